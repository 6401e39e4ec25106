"""`hsfs mount`: checks what can be checked, starts the process that serves the mount, and returns
when the mount answers through the kernel, or says why it does not."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from hsfs.cli import mount_checks, mountpoints, records
from hsfs.cli.mount_options import parse_options
from hsfs.cli.mount_order import MountOrder, encode_order, read_report, write_order
from hsfs.cli.output import Output
from hsfs.cli.sources import find_volume
from hsfs.core.config import Volume, with_cache, with_mount_options
from hsfs.core.errors import HsfsError, TimedOut, UsageError, from_code, from_os_error

_START_S = 180.0
_ANSWER_S = 30.0
_LOG_MAX = 16 * 1024**2
_NAME_MAX = 200

# For threads that start before the process has tuned its malloc: see process_limits.
_MALLOC = {"MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True, slots=True)
class MountRequest:
    """What the command line says."""

    source: str | None
    mountpoint: str
    options: Sequence[str] = ()
    backends: Sequence[str] = ()
    anonymous: bool = False
    strict: bool = False
    foreground: bool = False
    session: str = "auto"
    cache_dir: str | None = None
    cache_size: str | None = None
    memory_limit: str | None = None
    sloppy: bool = False
    fake: bool = False


def mount(request: MountRequest, output: Output) -> None:
    """Mount, or raise a leaf of HsfsError. In the foreground it does not return."""
    words = parse_options(request.options, sloppy=request.sloppy)
    mount_checks.check_session(words.values.get("session", request.session))
    volume, address = find_volume(
        request.source,
        request.mountpoint,
        request.backends,
        anonymous=request.anonymous or words.anonymous,
    )
    volume = _with_options(volume, words.values, request)
    mount_checks.check_fuse_device()
    mount_checks.check_fusermount()
    if words.allow_other:
        mount_checks.check_allow_other()
    mountpoint, warnings = mount_checks.check_mountpoint(request.mountpoint)
    mount_checks.check_volume(volume, mountpoint)
    for text in (*warnings, *words.notes):
        output.warn(text)
    if request.fake:
        output.result({"mountpoint": mountpoint, "volume": volume.name, "fake": True})
        return
    mount_checks.check_state(volume)
    order = MountOrder(
        mountpoint=mountpoint,
        address=address,
        allow_other=words.allow_other,
        options=words.passed,
        fsname=_fsname(words.values.get("fsname") or request.source or volume.name),
        strict=request.strict or words.strict,
        foreground=request.foreground,
        log="" if request.foreground else str(volume.state / "mount.log"),
        anonymous=request.anonymous or words.anonymous,
    )
    if request.foreground:
        _become(order, volume)
    _start(order, volume, output)


def _with_options(volume: Volume, values: dict[str, str], request: MountRequest) -> Volume:
    """The volume under -o and the options proper; the latter win."""
    for origin, directory, size in (
        ("-o", values.get("cache_dir"), values.get("cache_size")),
        ("--cache", request.cache_dir, request.cache_size),
    ):
        if directory is not None or size is not None:
            path = Path(directory) if directory is not None else None
            volume = with_cache(volume, path, size, origin)
    limits = ("memory_limit", "fd_limit", "readahead")
    keys = {key: text for key, text in values.items() if key in limits}
    volume = with_mount_options(volume, keys, "-o")
    if request.memory_limit is not None:
        limit = {"memory_limit": request.memory_limit}
        volume = with_mount_options(volume, limit, "--memory-limit")
    return volume


def _fsname(text: str) -> str:
    """The source as /proc/mounts shows it: commas would end the option."""
    if "://" not in text and not text.startswith("unix:") and os.path.exists(text):
        text = os.path.abspath(text)
    return text.replace(",", "_")[:_NAME_MAX]


def _command(order_fd: int, report_fd: int) -> list[str]:
    # Isolated (-I): neither the caller's directory nor its PYTHON* variables decide what runs.
    words = ["-I", "-m", "hsfs.cli.mount_process", str(order_fd), str(report_fd)]
    return [sys.executable, *words]


def _environment() -> dict[str, str]:
    return {**_MALLOC, **os.environ}


def _become(order: MountOrder, volume: Volume) -> None:
    """Go on as the serving process, in the foreground."""
    fd = write_order(encode_order(order, volume))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, _command(fd, -1), _environment())


def _open_log(path: Path) -> int:
    with suppress(OSError):
        if path.stat().st_size > _LOG_MAX:
            path.replace(path.with_suffix(".log.1"))
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise from_os_error(e, f"log file {path}") from e


def _start(order: MountOrder, volume: Volume, output: Output) -> None:
    order_fd = write_order(encode_order(order, volume))
    reader, writer = os.pipe2(os.O_CLOEXEC)
    log = _open_log(Path(order.log))
    logged = os.fstat(log).st_size
    try:
        # A session of its own, no terminal, nothing of the caller's left open: otherwise ssh and
        # systemd-mount would wait for the mount to end.
        child = subprocess.Popen(
            _command(order_fd, writer),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=_environment(),
            start_new_session=True,
            pass_fds=(order_fd, writer),
        )
    finally:
        for fd in (order_fd, writer, log):
            os.close(fd)
    degraded: list[str] = []
    try:
        for warning in read_report(_lines(reader, time.monotonic() + _START_S)):
            degraded.append(warning)
            output.warn(warning)
        _wait_answer(order.mountpoint)
    except HsfsError as e:
        _give_up(child, order)
        if e.next_step:
            raise
        raise from_code(e.code, e.what, e.why, _tail(order.log, logged)) from None
    except BaseException:
        _give_up(child, order)
        raise
    finally:
        os.close(reader)
    record = records.find(order.mountpoint)
    # The mount outlives us: Popen must not complain of a child that was not waited for.
    child.returncode = 0
    output.result(
        {
            "mountpoint": order.mountpoint,
            "pid": record.pid if record else child.pid,
            "volume": volume.name,
            "degraded": bool(degraded),
            "warnings": degraded,
        }
    )


def _lines(fd: int, end: float) -> Iterator[bytes]:
    buffer = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (left := end - time.monotonic()) > 0:
        if not poll.poll(left * 1000):
            break
        data = os.read(fd, 65536)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        yield from lines
    raise TimedOut("mount", f"did not start within {_START_S:g} s")


def _wait_answer(mountpoint: str) -> None:
    answer = mountpoints.answers(mountpoint, _ANSWER_S)
    if answer is None:
        raise TimedOut(mountpoint, f"the mount does not answer within {_ANSWER_S:g} s")
    if answer:
        raise HsfsError(
            mountpoint,
            f"the mount answers {errno.errorcode.get(answer, answer)}: {os.strerror(answer)}",
        )


def _give_up(child: subprocess.Popen[bytes], order: MountOrder) -> None:
    """End what was started and leave no dead mount."""
    with suppress(ProcessLookupError):
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(5)
    mounted = mountpoints.mounted_at(order.mountpoint)
    if mounted is not None and mounted.fs_type == mountpoints.FS_TYPE:
        with suppress(HsfsError):
            mountpoints.unmount(order.mountpoint, lazy=True, deadline_s=5)


def _tail(log: str, since: int) -> str:
    """Where to look, with what libfuse or fusermount3 said last: they know why, and only stderr."""
    try:
        with open(log, "rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    said = [line.strip() for line in lines if line.startswith(("fuse", "mount"))]
    return f"see {log}" + (f" ({said[-1]})" if said else "")


@click.command(
    help="Mount a volume. SOURCE is a volume file, hsfs://HOST:PORT/VOLUME or "
    "unix:/path.sock; with --backend there is no SOURCE."
)
@click.argument("words", nargs=-1, metavar="[SOURCE] MOUNTPOINT")
@click.option("-o", "options", multiple=True, metavar="OPTIONS", help="Mount options, by commas.")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground, log to stderr.")
@click.option(
    "--session",
    type=click.Choice(["auto", "kernel", "pyfuse3"]),
    default="auto",
    help="FUSE session.",
    show_default=True,
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="AT=URL",
    help="Show URL at AT; any backend key may follow as ?key=value. Repeatable.",
)
@click.option("--anonymous", is_flag=True, help="Buckets are public: send no credentials.")
@click.option("--cache-dir", metavar="DIR", help="Where cached bytes lie.")
@click.option("--cache-size", metavar="SIZE", help="Bound of the cache, as 500G.")
@click.option("--memory-limit", metavar="SIZE", help="Bound of the process's memory, as 512M.")
@click.option("--strict", is_flag=True, help="Refuse to mount when a backend can't be used.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    words: tuple[str, ...],
    options: tuple[str, ...],
    foreground: bool,
    session: str,
    backends: tuple[str, ...],
    anonymous: bool,
    cache_dir: str | None,
    cache_size: str | None,
    memory_limit: str | None,
    strict: bool,
    as_json: bool,
) -> None:
    """The verb."""
    source, mountpoint = _two(words, backends)
    request = MountRequest(
        source=source,
        mountpoint=mountpoint,
        options=options,
        backends=backends,
        anonymous=anonymous,
        strict=strict,
        foreground=foreground,
        session=session,
        cache_dir=cache_dir,
        cache_size=cache_size,
        memory_limit=memory_limit,
    )
    mount(request, Output(as_json))


def _two(words: Sequence[str], backends: Sequence[str]) -> tuple[str | None, str]:
    if len(words) == 2:
        return words[0], words[1]
    if len(words) == 1 and backends:
        return None, words[0]
    if len(words) == 1:
        raise UsageError(
            "mount",
            "no SOURCE",
            "hsfs mount SOURCE MOUNTPOINT, or --backend AT=URL MOUNTPOINT",
        )
    raise UsageError("mount", "needs [SOURCE] MOUNTPOINT", "see hsfs mount --help")
