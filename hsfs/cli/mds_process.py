"""The metadata server's process: composition root and life.

`run` is `hsfs mds` in the foreground; `main` is what a mount starts detached: it reads the volume
as JSON from stdin, leaves its parent, says on `--ready-fd` whether it serves (one line of JSON) and
logs to STATE/mds.log. Detached, it leaves 30 s after its last client when no scan needs it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hsfs.core.config import Volume, decode_volume
from hsfs.core.errors import HsfsError, Unavailable
from hsfs.rpc.address import SOCKET_NAME, Address, parse_listen, state_address

if TYPE_CHECKING:  # `run` loads them: `hsfs.cli.embedded` needs a few names of this module only
    from hsfs.mdserver.jobs import JobBoard
    from hsfs.mdserver.namespace import Namespace
    from hsfs.mdserver.server import Server
    from hsfs.mdserver.sessions import Sessions
    from hsfs.telemetry.metrics import Registry

LOG_NAME = "mds.log"
PID_NAME = "mds.pid"
IDLE_S = 30.0
_LOG_MAX = 16 * 1024 * 1024
_STORE_FOLDER = "meta"


@dataclass(frozen=True, slots=True)
class Serving:
    """Where a started server listens."""

    address: Address
    tcp: tuple[str, int] | None = None
    http: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How to serve. `listen`, `http`: HOST:PORT or None. `idle_s`: leave so long after the last
    client (None = stay). `lease_s`: of sessions. `mover`: run one as a child."""

    listen: str | None = None
    http: str | None = None
    idle_s: float | None = None
    lease_s: float = 30.0
    mover: bool = True


def run(volume: Volume, options: Options, ready: Callable[[Serving], None]) -> None:
    """Serve until SIGTERM, SIGINT, or nobody needs it. Raises Busy (another server has the state)
    and whatever else keeps it from starting; `ready` is called once it serves."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(volume, options, ready))


async def serve(volume: Volume, options: Options, ready: Callable[[Serving], None]) -> None:
    """As `run`, on the running loop."""
    import structlog

    from hsfs.mdserver.health import Health
    from hsfs.mdserver.jobs import JobBoard
    from hsfs.mdserver.lifecycle import (
        Child,
        StateLock,
        bind_tcp,
        bind_unix,
        ensure_token,
    )
    from hsfs.mdserver.namespace import Namespace
    from hsfs.mdserver.operations import Operations, backend_timeouts
    from hsfs.mdserver.scans import Scans
    from hsfs.mdserver.server import Identity, Server
    from hsfs.mdserver.sessions import Sessions
    from hsfs.mdserver.store.committer import Committer
    from hsfs.mdserver.store.lmdb import LmdbStore
    from hsfs.telemetry.metrics import Registry

    log = structlog.get_logger("hsfs.mds")
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    async with AsyncExitStack() as stack:
        lock = StateLock(volume.state, volume.name)
        stack.callback(lock.release)
        token = ensure_token(volume.state)
        store = await asyncio.to_thread(LmdbStore, volume.state / _STORE_FOLDER)
        stack.callback(store.close)
        committer = Committer(store)
        stack.callback(committer.close)

        namespace: Namespace
        health: Health
        board = JobBoard(
            backend_timeouts(lambda: namespace.devices()),
            lambda device, error, root: health.heard(device, error, root),
        )
        namespace = await stack.enter_async_context(
            Namespace(store, committer, volume, board, lease_s=options.lease_s)
        )
        health = Health(namespace)
        definition = definition_of(volume)

        def redefined(changed: Volume) -> None:
            nonlocal definition
            definition = definition_of(changed)

        sessions = Sessions()
        scans = Scans(namespace, board)
        operations = Operations(
            volume,
            namespace,
            board,
            scans,
            health,
            sessions,
            requests=lambda: server.requests,
            redefined=redefined,
            store_bytes=store.size,
        )
        server = Server(
            Identity(volume.name, namespace.uuid, token, namespace.lease_s, lambda: definition),
            namespace,
            operations.handlers(),
            sessions,
            left=lambda session: board.release(session.key),
        )
        stack.push_async_callback(server.aclose)
        stack.push_async_callback(scans.aclose)

        unix = bind_unix(volume.state)
        stack.callback(partial(_unlink_ours, volume.state / SOCKET_NAME))
        await server.listen(unix)
        tcp = http = None
        if options.listen is not None:
            sock = bind_tcp(*parse_listen(options.listen))
            tcp = sock.getsockname()[:2]
            await server.listen(sock)
        if options.http is not None:
            from hsfs.mdserver.http import start_http

            registry = Registry()
            _register(registry, namespace, sessions, board, server)
            host, port = parse_listen(options.http)
            http_runner, port = await start_http(
                host, port, registry, lambda: (True, list(namespace.devices()))
            )
            stack.push_async_callback(http_runner.cleanup)
            http = (host, port)
        _publish_pid(volume.state / PID_NAME)

        address = state_address(volume.state)
        tasks = [
            asyncio.create_task(board.run()),
            asyncio.create_task(health.run(board)),
        ]
        if options.mover:
            child = Child(
                [
                    sys.executable,
                    *("-I", "-m", "hsfs.cli.mover_process"),
                    *("--address", str(address), "--child"),
                ],
                sessions.heard_of,
                options.lease_s,
            )
            tasks.append(asyncio.create_task(child.run()))
        stack.push_async_callback(_cancel, tasks)
        scans.start_due()
        ready(Serving(address, tcp, http))
        log.info("serving", volume=volume.name, epoch=namespace.epoch, seq=namespace.seq)

        while not stop.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await stop.wait()
            for task in tasks:
                if task.done():
                    task.result()  # raises: a part of the server that broke ends it
                    raise Unavailable("metadata server", "a part of it ended")
            if not await asyncio.to_thread(lock.still_there):
                log.warning("the state directory is gone: leaving")
                break
            if (
                options.idle_s is not None
                and sessions.idle_s() >= options.idle_s
                and not scans.pending()
            ):
                log.info("nobody needs this server any more: leaving")
                break
        server.stop_listening()
        with suppress(OSError):
            (volume.state / PID_NAME).unlink()
        log.info("stopping")


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _publish_pid(path: Path) -> None:
    # By a rename: whoever reads it while another server takes over finds one pid or the other.
    new = path.with_name(f".{path.name}.new")
    new.write_text(f"{os.getpid()}\n")
    new.replace(path)


def _unlink_ours(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def definition_of(volume: Volume) -> bytes:
    """A hash of what a volume says of its backends."""
    import hashlib

    stated = [
        (b.name, b.url, b.at, sorted((key, repr(value)) for key, value in b.options.items()))
        for b in volume.backends
    ]
    return hashlib.blake2b(repr(stated).encode(), digest_size=16).digest()


def _register(
    registry: Registry,
    namespace: Namespace,
    sessions: Sessions,
    board: JobBoard,
    server: Server,
) -> None:
    gauge, counter = registry.gauge, registry.counter_from
    counter("hsfs_mds_requests_total", "Requests answered.", lambda: server.requests)
    counter("hsfs_mds_jobs_finished_total", "Jobs that movers ended.", lambda: board.finished)
    counter("hsfs_mds_jobs_failed_total", "Jobs that ended with an error.", lambda: board.failed)
    gauge("hsfs_mds_jobs_waiting", "Jobs that no mover has.", lambda: board.counts()[0])
    gauge("hsfs_mds_jobs_running", "Jobs that movers have.", lambda: board.counts()[1])
    gauge("hsfs_mds_journal_seq", "Position of the journal.", lambda: namespace.seq)
    gauge("hsfs_mds_epoch", "Starts of the server on this store.", lambda: namespace.epoch)
    for kind in ("mount", "mover", "tool"):
        gauge(
            "hsfs_mds_sessions",
            "Connected clients.",
            partial(sessions.count, kind),
            kind=kind,
        )
    for device in namespace.devices():
        labels = {"backend": device.name}

        def up(ident: int = device.id) -> float:
            return float(any(d.id == ident and d.state == "ok" for d in namespace.devices()))

        def scanned(ident: int = device.id) -> float:
            return float(sum(d.scanned for d in namespace.devices() if d.id == ident))

        gauge("hsfs_backend_up", "1 while the backend works.", up, **labels)
        gauge("hsfs_backend_entries", "Entries assimilated.", scanned, **labels)


# --- detached ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """What `hsfs.cli.embedded` starts. Exit code 0: it served; 1: the reason went to --ready-fd."""
    parser = argparse.ArgumentParser(prog="hsfs.cli.mds_process")
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--idle", type=float, default=IDLE_S)
    arguments = parser.parse_args(argv)
    os.set_inheritable(arguments.ready_fd, False)
    text = sys.stdin.buffer.read()
    if os.fork():
        os._exit(0)  # whoever started us waits for this process only
    os.setsid()
    os.chdir("/")
    os.umask(0o077)

    def report(body: dict[str, object]) -> None:
        if arguments.ready_fd >= 0:
            with suppress(OSError):
                os.write(arguments.ready_fd, msgspec.json.encode(body) + b"\n")
                os.close(arguments.ready_fd)
            arguments.ready_fd = -1

    try:
        volume = decode_volume(text)
        _redirect(volume.state)
        from hsfs.telemetry.logs import set_up_logging

        set_up_logging("mds")
        options = Options(volume.mds.listen, volume.mds.http, arguments.idle)
        run(volume, options, lambda serving: report({"ok": True}))
    except HsfsError as error:
        _complain(error)
        report(
            {
                "code": error.code,
                "what": error.what,
                "why": error.why,
                "next": error.next_step,
            }
        )
        return 1
    except Exception as error:
        _complain(error)
        report({"code": "Unavailable", "what": "metadata server", "why": repr(error), "next": ""})
        return 1
    return 0


def _redirect(state: Path) -> None:
    """stdin from nowhere, stdout and stderr to the log (the older log is kept as .1)."""
    from hsfs.core.errors import from_os_error

    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if null > 2:
        os.close(null)
    path = state / LOG_NAME
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            if path.stat().st_size > _LOG_MAX:
                path.replace(path.with_suffix(".log.1"))
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise from_os_error(error, str(state)) from error
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _complain(error: Exception) -> None:
    import traceback

    if isinstance(error, HsfsError):
        sys.stderr.write(f"hsfs mds: {error}\n")
    else:
        traceback.print_exc()
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
