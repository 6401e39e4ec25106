"""What runs here: one record per mount in the runtime folder, written by the mount itself.

A record counts while its process lives (pid and start time agree); the others are cleaned away by
whoever meets them. The folder is /run/hsfs for root, $XDG_RUNTIME_DIR/hsfs or /tmp/hsfs-UID for
others; HSFS_RUNTIME_DIR names another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hsfs.core.errors import PermissionDenied, from_os_error


@dataclass(frozen=True, slots=True)
class Record:
    """One mount. `started` is the start time of its process in clock ticks since boot, which makes
    the pid unmistakable; `socket` its control socket; `log` its log file ("" in the foreground)."""

    mountpoint: str
    pid: int
    started: int
    socket: str
    volume: str
    session: str = ""
    log: str = ""
    state: str = ""
    source: str = ""
    since: float = 0.0


def runtime_dir() -> Path:
    """The folder of records and sockets, made when needed. Raises PermissionDenied when it belongs
    to somebody else."""
    named = os.environ.get("HSFS_RUNTIME_DIR", "")
    user = os.environ.get("XDG_RUNTIME_DIR", "")
    if named.startswith("/"):
        path = Path(named)
    elif os.geteuid() == 0:
        path = Path("/run/hsfs")
    elif user.startswith("/") and os.access(user, os.W_OK | os.X_OK):
        path = Path(user) / "hsfs"
    else:
        path = Path("/tmp") / f"hsfs-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True, parents=bool(named))
        found = path.lstat()
    except OSError as e:
        raise from_os_error(e, f"runtime folder {path}") from e
    # /tmp is everybody's: a folder planted there by another user must not be trusted.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionDenied(
            f"runtime folder {path}",
            "is not a private folder of yours",
            "remove it, or set HSFS_RUNTIME_DIR to one",
        )
    return path


def _stem(mountpoint: str) -> str:
    return hashlib.blake2b(os.fsencode(mountpoint), digest_size=8).hexdigest()


def socket_path(mountpoint: str) -> Path:
    """Where the mount at this place listens for control calls."""
    return runtime_dir() / f"{_stem(mountpoint)}.sock"


def _record_path(mountpoint: str) -> Path:
    return runtime_dir() / f"{_stem(mountpoint)}.json"


def start_time(pid: int) -> int:
    """Start of a living process in clock ticks since boot; 0 when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = text.rpartition(b")")[2].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def alive(record: Record) -> bool:
    """Whether the very process that wrote the record still runs."""
    return record.pid > 0 and start_time(record.pid) == record.started != 0


def wait_end(record: Record, deadline_s: float) -> bool:
    """Whether the mount's process ends within the deadline."""
    end = time.monotonic() + deadline_s
    try:
        fd = os.pidfd_open(record.pid)
    except OSError:
        return not alive(record)
    try:
        if not alive(record):
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while (left := end - time.monotonic()) > 0:
            if poll.poll(left * 1000):
                return True
        return False
    finally:
        os.close(fd)


def write(record: Record) -> None:
    """Publish the record of a mount."""
    path = _record_path(record.mountpoint)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".record-")
    with os.fdopen(fd, "w") as file:
        json.dump(asdict(record), file)
    os.replace(temporary, path)


def _read(path: Path) -> Record | None:
    try:
        value = json.loads(path.read_bytes())
        return Record(**value)
    except (OSError, ValueError, TypeError):
        return None


def remove(record: Record) -> None:
    """Take back a mount's record and socket, unless a newer mount has replaced them."""
    path = _record_path(record.mountpoint)
    found = _read(path)
    if found is not None and (found.pid, found.started) != (record.pid, record.started):
        return
    for name in (path, Path(record.socket)):
        with suppress(OSError):
            name.unlink()


def find_all() -> list[Record]:
    """Records of living mounts, by mountpoint; dead ones are cleaned away."""
    found = []
    for path in sorted(runtime_dir().glob("*.json")):
        record = _read(path)
        if record is not None and alive(record):
            found.append(record)
        elif record is not None:
            remove(record)
        else:
            # Records are published by rename: what can't be read is no record of ours.
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > 60:
                    path.unlink()
    return sorted(found, key=lambda record: record.mountpoint)


def find(mountpoint: str) -> Record | None:
    """The record of the living mount at exactly this place."""
    record = _read(_record_path(mountpoint))
    return record if record is not None and alive(record) else None


def find_around(path: str) -> tuple[Record, str] | None:
    """The innermost living mount that holds an absolute path, and the path below it ("" = its
    root)."""
    best: Record | None = None
    for record in find_all():
        root = record.mountpoint.rstrip("/")
        inside = path == record.mountpoint or path.startswith(root + "/")
        if inside and (best is None or len(record.mountpoint) > len(best.mountpoint)):
            best = record
    if best is None:
        return None
    return best, path[len(best.mountpoint.rstrip("/")) :].strip("/")
