"""`hsfs umount`: idempotent, waits for the daemon to end, and with --force is over in 5 s whatever
hangs: the mount leaves the tree, operations in flight are aborted, the process is ended."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import click

from hsfs.cli import exits, mountpoints, records
from hsfs.cli.output import Output
from hsfs.core.errors import HsfsError, NotFound, TimedOut, Unavailable, UsageError
from hsfs.core.units import parse_duration
from hsfs.rpc.control import call

_FORCE_S = 4.5
_BY_ITSELF_S = 1.5


def umount(target: str, *, force: bool, timeout_s: float, output: Output) -> int:
    """Unmount; returns the exit code. Raises leaves of HsfsError."""
    end = time.monotonic() + (_FORCE_S if force else timeout_s)
    mountpoint = mountpoints.normal_path(target)
    mounted = mountpoints.mounted_at(mountpoint)
    record = records.find(mountpoint)
    if mounted is not None and mounted.fs_type != mountpoints.FS_TYPE:
        raise UsageError(target, f"is no hsfs mount but {mounted.fs_type}", f"umount {target}")
    if mounted is None and record is None:
        output.result(
            {"mountpoint": mountpoint, "unmounted": False, "why": "not mounted"},
        )
        if not output.json:
            output.note(f"{target}: nothing is mounted there")
        return exits.OK
    if force:
        _force(mountpoint, mounted, record, end)
    else:
        if mounted is not None:
            with suppress(NotFound):  # gone meanwhile: just what was wanted
                mountpoints.unmount(mountpoint, lazy=False, deadline_s=timeout_s)
        if record is not None and not records.wait_end(record, min(_BY_ITSELF_S, timeout_s)):
            # The mount is gone from here, yet the kernel keeps the session: another mount
            # namespace (a container, a service with private mounts) has a copy of it.
            with suppress(Unavailable):
                call(Path(record.socket), "umount", {"if_idle": True}, silence_s=timeout_s)
        if record is not None and not records.wait_end(record, max(end - time.monotonic(), 0)):
            raise TimedOut(
                target,
                f"is unmounted, but its process {record.pid} does not end within {timeout_s:g} s",
                f"hsfs umount --force {target}",
            )
    if record is not None and not records.alive(record):
        records.remove(record)
    output.result({"mountpoint": mountpoint, "unmounted": True})
    return exits.OK


def _force(
    mountpoint: str,
    mounted: mountpoints.Mounted | None,
    record: records.Record | None,
    end: float,
) -> None:
    # Out of the tree first: from here on nobody new can get stuck in it.
    trouble: HsfsError | None = None
    if mounted is not None:
        try:
            mountpoints.unmount(mountpoint, lazy=True, deadline_s=2)
        except NotFound:
            pass
        except HsfsError as e:
            trouble = e
    if record is not None:
        with suppress(HsfsError):
            call(Path(record.socket), "umount", {"force": True}, silence_s=0.5)
        if not records.wait_end(record, 1.5):
            _signal(record, signal.SIGTERM)
    # Open files keep a detached mount alive: end its connection, so that they fail at once and
    # whoever waits in the kernel is let go.
    if mounted is not None and (record is None or records.alive(record)):
        mountpoints.abort_connection(mounted.minor)
    if record is not None and not records.wait_end(record, 1.0):
        _signal(record, signal.SIGKILL)
        records.wait_end(record, max(end - time.monotonic(), 0.2))
    if trouble is not None and mountpoints.mounted_at(mountpoint) is not None:
        raise trouble


def _signal(record: records.Record, number: signal.Signals) -> None:
    try:
        fd = os.pidfd_open(record.pid)
    except OSError:
        return
    try:
        # The pidfd pins the process: the check and the signal mean the same one.
        if records.alive(record):
            with suppress(OSError):
                signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


@click.command(help="Unmount MOUNTPOINT and wait for its process to end.")
@click.argument("mountpoint")
@click.option("--force", is_flag=True, help="At once, whatever is open or hangs.")
@click.option("--no-drain", is_flag=True, help="Don't wait for unwritten data (there is none yet).")
@click.option("--timeout", default="60s", show_default=True, help="How long to wait.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(mountpoint: str, force: bool, no_drain: bool, timeout: str, as_json: bool) -> int:
    """The verb."""
    try:
        timeout_s = parse_duration(timeout)
    except ValueError as e:
        raise UsageError("--timeout", str(e)) from None
    return umount(mountpoint, force=force, timeout_s=timeout_s, output=Output(as_json))
