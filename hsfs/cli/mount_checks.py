"""What can be known to be wrong before anything starts: each with its own clear error."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from hsfs.cli.mountpoints import answers, in_child, mounted_at, normal_path
from hsfs.core.config import Volume, file_root
from hsfs.core.errors import (
    AlreadyExists,
    Busy,
    ConfigError,
    HsfsError,
    NotADirectory,
    NotFound,
    NotSupported,
    PermissionDenied,
    TimedOut,
    UsageError,
    from_os_error,
)

_ANSWER_S = 3.0
_STATE_STEP = "set state in [volume], or XDG_STATE_HOME"


def check_fuse_device(device: Path = Path("/dev/fuse")) -> None:
    """Raises NotSupported, PermissionDenied."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise NotSupported(
            str(device),
            "does not exist",
            "load the module (modprobe fuse); in a container add --device /dev/fuse",
        ) from None
    except PermissionError:
        raise PermissionDenied(
            str(device),
            "can't be opened by you",
            f"chmod 666 {device}; in a container add --device /dev/fuse --cap-add SYS_ADMIN",
        ) from None
    except OSError as e:
        if e.errno in (errno.ENODEV, errno.ENXIO):
            raise NotSupported(str(device), "the kernel has no FUSE", "modprobe fuse") from None
        raise from_os_error(e, str(device)) from e


def check_fusermount() -> None:
    """Others than root mount through fusermount3. Raises NotFound, PermissionDenied."""
    if os.geteuid() == 0:
        return
    program = shutil.which("fusermount3")
    if program is None:
        raise NotFound("fusermount3", "is not installed", "install the package fuse3")
    if not os.stat(program).st_mode & stat.S_ISUID:
        raise PermissionDenied(
            program, "is not setuid root, so only root can mount", f"chmod u+s {program}"
        )


def user_allow_other(config: Path = Path("/etc/fuse.conf")) -> bool:
    """Whether fuse.conf lets everybody use allow_other."""
    try:
        lines = config.read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split("#")[0].strip() == "user_allow_other" for line in lines)


def check_allow_other(config: Path = Path("/etc/fuse.conf")) -> None:
    """Raises PermissionDenied when this user may not use allow_other."""
    if os.geteuid() != 0 and not user_allow_other(config):
        raise PermissionDenied(
            "-o allow_other",
            f"is for root only on this machine: {config} has no user_allow_other",
            f"add the line user_allow_other to {config}, or mount without it",
        )


def check_mountpoint(path: str) -> tuple[str, tuple[str, ...]]:
    """The normal path of a usable mountpoint, and warnings about it.

    Raises NotFound, NotADirectory, AlreadyExists (mounted), TimedOut, PermissionDenied, Busy (a
    dead mount lies there).
    """
    mountpoint = normal_path(path)
    mounted = mounted_at(mountpoint)
    if mounted is not None and mounted.fs_type.startswith("fuse"):
        answer = answers(mountpoint, _ANSWER_S)
        if answer == errno.ENOTCONN:
            raise Busy(
                mountpoint,
                "a dead mount is still there (its process has ended)",
                f"hsfs umount --force {mountpoint}",
            )
        if answer is None:
            raise TimedOut(
                mountpoint,
                "a mount that does not answer is there",
                f"hsfs umount --force {mountpoint}",
            )
        if mounted.fs_type == "fuse.hsfs":
            raise AlreadyExists(
                mountpoint, "hsfs is mounted there already", f"hsfs umount {mountpoint}"
            )
    return mountpoint, tuple(_look(mountpoint))


def _look(mountpoint: str) -> Iterator[str]:
    def probe() -> int:
        with os.scandir(mountpoint) as entries:
            return 0 if next(entries, None) is None else errno.ENOTEMPTY

    try:
        # Below a kernel NFS mount even a stat may hang: not in this process.
        answer = in_child(probe, _ANSWER_S)
    except OSError as e:
        raise from_os_error(e, mountpoint) from e
    if answer is None:
        raise TimedOut(mountpoint, "the file system that it lies on does not answer")
    if answer == errno.ENOENT:
        raise NotFound(mountpoint, "there is no such directory", f"mkdir -p {mountpoint}")
    if answer == errno.ENOTDIR:
        raise NotADirectory(mountpoint, "is not a directory", "name a directory to mount on")
    if answer == errno.EACCES:
        raise PermissionDenied(mountpoint, "you may not read it", "choose a directory of yours")
    if answer == errno.ENOTEMPTY:
        yield f"{mountpoint} is not empty: what it holds is hidden while mounted"
    elif answer:
        raise from_os_error(OSError(answer, os.strerror(answer)), mountpoint)
    if os.geteuid() != 0 and not os.access(mountpoint, os.W_OK):
        # fusermount3 insists on it, and says only "user has no write access".
        raise PermissionDenied(
            mountpoint, "you may not write to it", "choose a directory of yours, or mount as root"
        )


def check_volume(volume: Volume, mountpoint: str) -> None:
    """Places that would contain one another. Raises ConfigError."""
    here = Path(mountpoint)
    for backend in volume.backends:
        root = file_root(backend)
        if root is None:
            continue
        real = Path(normal_path(str(root)))
        if real == here or here in real.parents:
            raise ConfigError(
                f'backend "{backend.name}"',
                f"its directory {root} lies in the mountpoint {mountpoint}: it would hide itself",
                "mount elsewhere",
            )
        if real in here.parents:
            raise ConfigError(
                f'backend "{backend.name}"',
                f"the mountpoint {mountpoint} lies in its directory {root}: it would hold itself",
                "mount elsewhere",
            )
    for what, path in (("state", volume.state), ("cache", volume.cache.dir)):
        if path == here or here in path.parents:
            raise ConfigError(
                f"{what} directory {path}", "lies in the mountpoint", "move it, or mount elsewhere"
            )


def check_state(volume: Volume) -> None:
    """Make the state directory. Raises PermissionDenied and other leaves."""
    for what, path in (("state", volume.state), ("cache", volume.cache.dir)):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise ConfigError(f"{what} directory {path}", "is not a directory") from None
        except OSError as e:
            if what == "cache":
                return  # the mount works without a cache, and status says so
            error = from_os_error(e, f"{what} directory {path}")
            raise type(error)(error.what, error.why, _STATE_STEP) from e
        if not os.access(path, os.W_OK | os.X_OK) and what == "state":
            raise PermissionDenied(
                f"{what} directory {path}", "can't be written by you", _STATE_STEP
            )


def check_session(session: str) -> None:
    """Raises UsageError for a session that this version does not have."""
    if session == "kernel":
        raise UsageError(
            "--session kernel", "is not in this version", "leave it out, or --session pyfuse3"
        )


def explain(error: BaseException) -> HsfsError:
    """Any exception of a start as one line for a person."""
    if isinstance(error, HsfsError):
        return error
    if isinstance(error, BaseExceptionGroup):
        ours, rest = error.split(HsfsError)
        inner = (ours if ours is not None else rest).exceptions  # type: ignore[union-attr]
        return explain(inner[0])
    if isinstance(error, OSError):
        return from_os_error(error, "mount")
    return HsfsError("mount", f"{type(error).__name__}: {error}", "see the log")
