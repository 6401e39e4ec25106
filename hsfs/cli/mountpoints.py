"""Mountpoints as the kernel sees them, asked so that a dead or hung file system can't hang us.

/proc/self/mountinfo answers without touching the mounted file system; whatever has to touch it is
done by a child that can be killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hsfs.core.errors import Busy, HsfsError, NotFound, PermissionDenied, from_os_error

MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

FS_TYPE = "fuse.hsfs"


@dataclass(frozen=True, slots=True)
class Mounted:
    """One line of mountinfo. `minor` of a FUSE mount is the number of its connection."""

    mountpoint: str
    fs_type: str
    source: str
    minor: int
    options: str


def _unescape(text: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), text))


def mounts() -> list[Mounted]:
    """All mounts of this namespace; a later one hides an earlier one on the same mountpoint."""
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        fields, kind = before.split(b" "), after.split(b" ")
        if len(fields) < 6 or len(kind) < 2:
            continue
        found.append(
            Mounted(
                mountpoint=_unescape(fields[4]),
                fs_type=_unescape(kind[0]),
                source=_unescape(kind[1]),
                minor=int(fields[2].partition(b":")[2]),
                options=_unescape(fields[5]),
            )
        )
    return found


def mounted_at(mountpoint: str) -> Mounted | None:
    """What is mounted on top of exactly this path, if anything."""
    for mount in reversed(mounts()):
        if mount.mountpoint == mountpoint:
            return mount
    return None


def normal_path(path: str) -> str:
    """The absolute path with the links above and at it resolved, touching no FUSE mount: the walk
    stops at the first one."""
    rest = [part for part in os.path.abspath(path).split("/") if part]
    fuse = {m.mountpoint for m in mounts() if m.fs_type.startswith("fuse")}
    done = ""
    links = 0
    while rest:
        step = rest.pop(0)
        if step == "..":
            done = os.path.dirname(done).rstrip("/")
            continue
        here = f"{done}/{step}"
        if here in fuse:
            return "/".join([here, *rest])
        try:
            target = os.readlink(here)
        except OSError:
            done = here
            continue
        links += 1
        if links > 40:
            raise HsfsError(path, "too many levels of symbolic links")
        if target.startswith("/"):
            done = ""
        rest = [part for part in target.split("/") if part not in ("", ".")] + rest
    return done or "/"


def in_child(work: Callable[[], int], deadline_s: float) -> int | None:
    """The errno (0 = fine) of `work`, done by a forked child; None when it has not ended within
    the deadline (the child is killed, and left to the kernel where even that has to wait)."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads: this child makes a system call and leaves.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = errno.EIO
        try:
            code = work()
        except OSError as e:
            code = e.errno or errno.EIO
        finally:
            with suppress(OSError):
                os.write(writer, bytes([code & 0xFF]))
            os._exit(0)
    os.close(writer)
    try:
        import select

        poll = select.poll()
        poll.register(reader, select.POLLIN)
        if poll.poll(deadline_s * 1000):
            answer = os.read(reader, 1)
            return answer[0] if answer else errno.EIO
        return None
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _reap(pid)


def _reap(pid: int) -> None:
    # A child in uninterruptible sleep can't be waited for; init inherits it when we exit.
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            return
        time.sleep(0.005)


def answers(mountpoint: str, deadline_s: float) -> int | None:
    """errno of a stat through the kernel (0 = it answers), None = no answer in time. statfs as
    well: the attributes of a dead mount's root may still be known to the kernel."""

    def work() -> int:
        os.stat(mountpoint)
        os.statvfs(mountpoint)
        return 0

    return in_child(work, deadline_s)


_libc = ctypes.CDLL(None, use_errno=True)


def _umount2(mountpoint: str, flags: int) -> None:
    if _libc.umount2(os.fsencode(mountpoint), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), mountpoint)


def unmount(mountpoint: str, *, lazy: bool, deadline_s: float) -> None:
    """Take the mount out of the tree: umount2(2) as root, fusermount3 as anybody else. Touches only
    the parent directory. Raises Busy, NotFound (nothing mounted there), PermissionDenied."""
    if os.geteuid() == 0:
        try:
            _umount2(mountpoint, UMOUNT_NOFOLLOW | (MNT_DETACH if lazy else 0))
            return
        except OSError as e:
            if e.errno == errno.EBUSY:
                raise _busy(mountpoint) from None
            if e.errno in (errno.EINVAL, errno.ENOENT):
                raise NotFound(mountpoint, "nothing is mounted there") from None
            if e.errno == errno.EPERM:
                raise PermissionDenied(
                    mountpoint, "may not unmount here", "run it where CAP_SYS_ADMIN is given"
                ) from None
            raise from_os_error(e, mountpoint) from e
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", mountpoint]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise NotFound("fusermount3", "is not installed", "install the package fuse3") from None
    except subprocess.TimeoutExpired:
        raise HsfsError(mountpoint, "fusermount3 does not end", "try --force") from None
    if done.returncode == 0:
        return
    said = done.stderr.strip().removeprefix("fusermount3: ")
    if "busy" in said:
        raise _busy(mountpoint)
    if "not found" in said or "not mounted" in said:
        raise NotFound(mountpoint, "nothing is mounted there")
    raise PermissionDenied(
        mountpoint, said or "fusermount3 refuses", "run it as the one who mounted"
    )


def _busy(mountpoint: str) -> Busy:
    return Busy(
        mountpoint,
        "files or directories in it are in use",
        f"end those programs (fuser -vm {mountpoint}), or use --force",
    )


def abort_connection(minor: int) -> bool:
    """End a FUSE connection: every operation in flight fails with ENOTCONN. Needs fusectl mounted
    and root or the mount's owner."""
    try:
        Path(f"/sys/fs/fuse/connections/{minor}/abort").write_text("1")
    except OSError:
        return False
    return True
