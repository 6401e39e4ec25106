"""The process that serves one mount: `python -I -m hsfs.cli.mount_process ORDER_FD REPORT_FD`.

Composition root of metadata client, Tier 0, backends, Vfs and FUSE session. One way out for every
cause (signal, `hsfs umount`, an unmount from outside, the session's end): operations stop, the
mount leaves the tree, the cache is flushed, the record goes. A watchdog thread ends the process
when that takes too long, after detaching the mount, so that nothing is ever left hanging.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

from hsfs.backends.registry import open_backend
from hsfs.cache.store import open_store
from hsfs.cli import mountpoints, process_limits, records
from hsfs.cli.embedded import ensure_embedded
from hsfs.cli.mount_backends import MountBackends
from hsfs.cli.mount_checks import explain
from hsfs.cli.mount_control import Facts, MountControl
from hsfs.cli.mount_order import MountOrder, Report, decode_order
from hsfs.core.config import Volume, encode_volume
from hsfs.core.errors import HsfsError, Unavailable
from hsfs.core.ports import ChunkStore
from hsfs.fuse.options import MountOptions
from hsfs.fuse.pyfuse3_session import serve
from hsfs.rpc.address import Address, find_token, parse_address
from hsfs.rpc.client import MdsClient, connect
from hsfs.rpc.control_server import bind, serve_control
from hsfs.telemetry.logs import set_up_logging
from hsfs.vfs.filesystem import Vfs
from hsfs.vfs.limits import Limits

_log = logging.getLogger("hsfs.mount")

_CACHE_MAX = 64 * 1024**3
_CACHE_MIN = 256 * 1024**2
_PROBE_S = 5.0
_PROBE_STRICT_S = 40.0
_END_S = 20.0
_WATCH_S = 2.0
_WATCH_MISSES = 2
_END_FORCED_S = 2.0
_SESSION = "pyfuse3"
_SESSION_REASON = "the only session of this version"


class _End:
    """The one way out. `begin` may be called from anywhere on the loop, any number of times."""

    def __init__(self, mountpoint: str) -> None:
        self.mountpoint = mountpoint
        self.minor: int | None = None  # of our mount, once it is there
        self.begun = trio.Event()
        self._done = threading.Event()
        self._deadline_s = 0.0

    def _there(self) -> bool:
        """Whether the mount on the mountpoint is ours."""
        mounted = mountpoints.mounted_at(self.mountpoint)
        return mounted is not None and mounted.minor == self.minor

    def begin(self, force: bool = False) -> None:
        """Start the end, with the watchdog behind it."""
        deadline_s = _END_FORCED_S if force else _END_S
        end = time.monotonic() + deadline_s
        if not self.begun.is_set():
            self._deadline_s = end
            if self.minor is not None and not self._there():
                # Copies in other mount namespaces end, too; and libfuse, which would unmount
                # whatever lies on the mountpoint by now, sees that there is nothing to unmount.
                mountpoints.abort_connection(self.minor)
            self.begun.set()
            threading.Thread(target=self._watch, name="hsfs-end", daemon=True).start()
        self._deadline_s = min(self._deadline_s, end)

    def _watch(self) -> None:
        while (left := self._deadline_s - time.monotonic()) > 0:
            if self._done.wait(min(left, 0.2)):
                return
        _log.error("the end takes too long: leaving at once")
        self.detach()
        if self.minor is not None:
            mountpoints.abort_connection(self.minor)
        os._exit(1)

    def detach(self) -> None:
        """Take our mount out of the tree if it still is there, and nobody else's."""
        if not self._there():
            return
        try:
            mountpoints.unmount(self.mountpoint, lazy=True, deadline_s=5)
        except HsfsError as e:
            _log.warning("unmounting: %s", e)

    async def keep_watch(self, handles: Callable[[], int]) -> None:
        """End when the mount left our tree and no file is open, though the kernel keeps the session
        because another mount namespace has a copy of it that nobody will unmount."""
        missed = 0
        while True:
            await trio.sleep(_WATCH_S)
            waiting = self.minor is None or handles() > 0
            missed = 0 if waiting or self._there() else missed + 1
            if missed >= _WATCH_MISSES:
                _log.info("no longer mounted here, and nothing is open")
                self.begin()
                return

    def done(self) -> None:
        """Everything is closed: the watchdog may go."""
        self._done.set()


def default_cache_size(directory: Path) -> int:
    """min(50% of free, 64G), where free counts what the cache itself holds already."""
    try:
        here = next(p for p in (directory, *directory.parents) if p.exists())
        free = shutil.disk_usage(here).free
    except (OSError, StopIteration):
        return _CACHE_MIN
    return max(_CACHE_MIN, min(free // 2, _CACHE_MAX))


async def run(order: MountOrder, volume: Volume, report: Report) -> None:
    """Serve until the end. Raises what kept the mount from coming to be."""
    end = _End(order.mountpoint)
    ready = False

    async def signals() -> None:
        with trio.open_signal_receiver(
            signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
        ) as received:
            async for number in received:
                _log.info("%s: unmounting", signal.Signals(number).name)
                # A second signal means: now.
                end.begin(force=end.begun.is_set())

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(signals)
            scope = trio.CancelScope()

            async def cancel_at_end() -> None:
                await end.begun.wait()
                scope.cancel()

            nursery.start_soon(cancel_at_end)

            def on_ready() -> None:
                nonlocal ready
                ready = True
                mounted = mountpoints.mounted_at(order.mountpoint)
                end.minor = mounted.minor if mounted is not None else None
                report.ready()
                _log.info("mounted on %s", order.mountpoint)
                if order.foreground:
                    sys.stderr.write(f"hsfs: mounted on {order.mountpoint}, Ctrl-C unmounts\n")

            with scope:
                await _serve(order, volume, report, end, on_ready)
            end.begin()
            nursery.cancel_scope.cancel()
    finally:
        end.detach()
        end.done()
    if not ready:
        raise HsfsError("mount", "was ended while starting")


@asynccontextmanager
async def _metadata(order: MountOrder, volume: Volume) -> AsyncIterator[MdsClient]:
    revive: Callable[[], Awaitable[None]] | None = None
    if order.address:
        address = parse_address(order.address)
    else:
        address = await _embedded(volume)

        async def revive() -> None:
            await _embedded(volume)

    async with connect(address, token=find_token(address), revive=revive) as mds:
        yield mds


async def _embedded(volume: Volume) -> Address:
    return await trio.to_thread.run_sync(ensure_embedded, volume, abandon_on_cancel=True)


@asynccontextmanager
async def _tier0(volume: Volume) -> AsyncIterator[ChunkStore]:
    size = volume.cache.size or default_cache_size(volume.cache.dir)
    limit = process_limits.raise_fd_limit()
    fds = process_limits.cache_fds(limit, volume.mount.fd_limit)

    def opened() -> ChunkStore:
        return open_store(volume.cache.dir, size, fd_limit=fds)

    store = await trio.to_thread.run_sync(opened)
    try:
        yield store
    finally:
        # In a thread that may be left behind: a dead cache disk must not hold the end up; the
        # watchdog bounds it.
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(store.close, abandon_on_cancel=True)


async def _serve(
    order: MountOrder,
    volume: Volume,
    report: Report,
    end: _End,
    on_ready: Callable[[], None],
) -> None:
    process_limits.tune_malloc()
    notes = process_limits.protect()
    async with _metadata(order, volume) as mds, _tier0(volume) as store:
        anonymous: dict[str, str | int | float | bool] = (
            {"anonymous": True} if order.anonymous else {}
        )
        backends = MountBackends(open_backend, mds.report, anonymous)
        try:
            devices = await mds.devices()
            probe_s = _PROBE_STRICT_S if order.strict else _PROBE_S
            for health in await backends.start(devices, probe_s):
                if order.strict:
                    raise Unavailable(
                        f'backend "{health.device.name}"',
                        f"{health.state}: {health.why}",
                        health.next_step or "mount without --strict to go on without it",
                    )
                report.warn(health.line())
            vfs = Vfs(
                mds=mds,
                store=store,
                backends=backends.opened,
                limits=_limits(volume),
            )
            facts = Facts(
                record=_record(order, volume),
                session=_SESSION,
                session_reason=_SESSION_REASON,
                allow_other=order.allow_other,
                memory_limit=volume.mount.memory_limit,
                notes=notes,
            )
            control = MountControl(
                facts=facts,
                mds=mds,
                connected=lambda: mds.connected,
                vfs=vfs,
                store=store,
                backends=backends,
                end=end.begin,
            )
            listener = bind(records.socket_path(order.mountpoint))
            records.write(facts.record)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(serve_control, listener, control.handle)
                    nursery.start_soon(backends.keep)
                    nursery.start_soon(end.keep_watch, lambda: len(vfs.files))
                    nursery.start_soon(process_limits.keep_trimmed)
                    await serve(vfs, order.mountpoint, _options(order, volume), ready=on_ready)
                    _log.info("the session has ended")
                    nursery.cancel_scope.cancel()
            finally:
                records.remove(facts.record)
        finally:
            await backends.aclose()


def _limits(volume: Volume) -> Limits:
    mount = volume.mount
    if mount.readahead is None:
        return Limits(memory_limit=mount.memory_limit)
    return Limits(memory_limit=mount.memory_limit, readahead=mount.readahead)


def _options(order: MountOrder, volume: Volume) -> MountOptions:
    return MountOptions(
        fsname=order.fsname,
        allow_other=order.allow_other,
        extra=("ro", *order.options),
        config=encode_volume(volume) + b"\n",
    )


def _record(order: MountOrder, volume: Volume) -> records.Record:
    pid = os.getpid()
    return records.Record(
        mountpoint=order.mountpoint,
        pid=pid,
        started=records.start_time(pid),
        socket=str(records.socket_path(order.mountpoint)),
        volume=volume.name,
        session=_SESSION,
        log=order.log,
        source=order.address or str(volume.source or ""),
        since=time.time(),
    )


def main() -> int:
    """0 after a clean end; 32 when the mount did not come to be."""
    order_fd, report_fd = int(sys.argv[1]), int(sys.argv[2])
    report = Report(report_fd)
    with os.fdopen(order_fd, "rb") as file:
        order, volume = decode_order(file.read())
    set_up_logging("mount", "warning" if order.foreground else "info")
    os.chdir("/")
    if report_fd >= 0:
        os.set_inheritable(report_fd, False)
    try:
        trio.run(run, order, volume, report)
    except BaseException as e:
        error = explain(e)
        report.failed(error)
        if order.foreground:
            sys.stderr.write(f"hsfs: {error}\n")
        ours = isinstance(e, HsfsError) or (
            isinstance(e, BaseExceptionGroup) and e.split(HsfsError)[1] is None
        )
        _log.error("the mount failed: %s", error, exc_info=None if ours else e)
        return 32
    finally:
        with suppress(OSError):
            sys.stderr.flush()
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Threads that wait for a dead backend or disk must not keep the process.
    os._exit(code)
