"""The cache directory on disk: slots, locks, and where a cache file lies.

    DIR/0/lock            flock of the process that uses the slot; its pid, its run
    DIR/0/index           the log of `hsfs.cache.index`
    DIR/0/data/AA/BB/INO-HASH    cache files; AA and BB are the middle bytes of the inode number

Two processes on one DIR use different slots. The kernel drops a dead process's lock, so that the
slot and its content are taken up by the next process. Consecutive inode numbers share a folder:
with a hash in their place nearly every one of the first 65,536 files would pay for a mkdir.
All access goes through the slot's open directory, never again through its path: a file system
mounted over (or unmounted from under) DIR can't make two places out of one cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_64_intdigest

from hsfs.core.types import FileVersion

SLOTS_MAX = 64
IDLE_SLOT_S = 7 * 86400  # an abandoned slot (of a second mount long gone) is removed after this

_KEY = struct.Struct(">QQ")
_SIZE = struct.Struct(">Q")
_MAKE = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def key_of(file: FileVersion) -> bytes:
    """16 bytes that name a cache file: the inode and a hash of the version and size."""
    return _KEY.pack(file.ino, xxh3_64_intdigest(file.version + _SIZE.pack(file.size)))


def path_of(key: bytes) -> str:
    """Where the file lies, relative to the slot."""
    ino, digest = _KEY.unpack(key)
    return f"data/{ino >> 16 & 255:02x}/{ino >> 8 & 255:02x}/{ino:x}-{digest:016x}"


def key_from_name(name: str) -> bytes | None:
    """The key of a file by its name; None for a name that is not ours."""
    ino, dash, digest = name.partition("-")
    try:
        key = _KEY.pack(int(ino, 16), int(digest, 16))
    except (ValueError, struct.error):
        return None
    return key if dash and path_of(key).endswith(f"/{name}") else None


class Slot:
    """An owned slot. Everything raises OSError; blocking, but for nothing longer than a disk."""

    def __init__(self, directory: Path, number: int, folder: int, lock: int) -> None:
        self.path = directory / str(number)
        self.number = number
        self.fd = folder
        self.below = _device_below(directory)
        self._directory = directory
        self._lock = lock

    @classmethod
    def acquire(cls, directory: Path, forbidden: int | None = None) -> Slot:
        """Lock the first free slot, making what is missing.

        `forbidden`: a device that the directory must not be on. A cache disk that was unmounted
        under us leaves a path on the disk below, which is not ours to fill.
        """
        if forbidden is not None and _device_of(directory) == forbidden:
            raise OSError(errno.ENODEV, "its file system is no longer mounted")
        directory.mkdir(0o700, parents=True, exist_ok=True)
        for number in range(SLOTS_MAX):
            folder = directory / str(number)
            folder.mkdir(0o700, exist_ok=True)
            fd = os.open(folder, _FOLDER)
            lock = -1
            try:
                lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=fd)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                slot = cls(directory, number, fd, lock)
                if not slot.in_place():  # removed as idle between open and lock
                    raise BlockingIOError(errno.EAGAIN, "slot went away")
                with contextlib.suppress(FileExistsError):
                    os.mkdir("data", 0o700, dir_fd=fd)
                return slot
            except BlockingIOError:
                _close(lock, fd)
            except BaseException:
                _close(lock, fd)
                raise
        raise OSError(errno.EBUSY, f"all {SLOTS_MAX} slots are in use by other processes")

    def last_run(self) -> int:
        """The run that `note_run` noted last; -1 if none is readable."""
        try:
            return int(os.pread(self._lock, 64, 0).split()[1])
        except (IndexError, ValueError):
            return -1

    def note_run(self, run: int) -> None:
        """Leave our pid, for people, and our run: an index that ends before it lost its tail."""
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()} {run}\n".encode(), 0)

    def in_place(self) -> bool:
        """Whether the slot's path still leads to the slot. Raises OSError on a failing disk."""
        ours = os.fstat(self.fd)
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) and ours.st_nlink > 0

    def make(self, key: bytes) -> int:
        """A new, empty cache file, open for reading and writing."""
        path = path_of(key)
        try:
            return os.open(path, _MAKE, 0o600, dir_fd=self.fd)
        except FileNotFoundError:
            part = path[: path.rindex("/")]
            for folder in (part[: part.rindex("/")], part):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700, dir_fd=self.fd)
            return os.open(path, _MAKE, 0o600, dir_fd=self.fd)

    def open(self, key: bytes, flags: int) -> int:
        """An existing cache file."""
        return os.open(path_of(key), flags | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.fd)

    def stat(self, key: bytes) -> os.stat_result:
        """Attributes of what lies in a cache file's place."""
        return os.stat(path_of(key), dir_fd=self.fd, follow_symlinks=False)

    def remove(self, key: bytes) -> None:
        """Unlink a cache file; absent is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path_of(key), dir_fd=self.fd)

    def names(self) -> Iterator[tuple[str, str]]:
        """(path, name) of everything that lies in the place of cache files, relative to us."""
        for outer in self._entries("data"):
            for inner in self._entries(f"data/{outer}"):
                for name in self._entries(f"data/{outer}/{inner}"):
                    yield f"data/{outer}/{inner}/{name}", name

    def _entries(self, path: str) -> list[str]:
        try:
            fd = os.open(path, _FOLDER, dir_fd=self.fd)
        except (NotADirectoryError, FileNotFoundError):
            return []
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def remove_path(self, path: str) -> None:
        """Unlink what lies at a path given by `names`; what can't be is left."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            os.unlink(path, dir_fd=self.fd)

    def probe(self) -> None:
        """Prove that files can be made and written here."""
        fd = os.open("probe", _MAKE, 0o600, dir_fd=self.fd)
        try:
            os.write(fd, b"probe")
        finally:
            os.close(fd)
            os.unlink("probe", dir_fd=self.fd)

    def remove_idle(self) -> None:
        """Remove other slots that nobody holds and nobody has used for a week."""
        for number in range(SLOTS_MAX):
            folder = self._directory / str(number)
            if number == self.number:
                continue
            try:
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(lock).st_mtime > IDLE_SLOT_S:
                    shutil.rmtree(folder, ignore_errors=True)
            except OSError:
                continue
            finally:
                os.close(lock)

    def close(self) -> None:
        """Give the slot back."""
        with contextlib.suppress(OSError):
            os.utime(self._lock)
        _close(self._lock, self.fd)
        self._lock = self.fd = -1


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _device_of(path: Path) -> int:
    """The device that a path is on, or would be made on."""
    while True:
        try:
            return os.stat(path).st_dev
        except FileNotFoundError:
            path = path.parent


def _device_below(path: Path) -> int | None:
    """The device that the path would be on were its file system unmounted; None on the root's."""
    path = path.resolve()
    device = os.stat(path).st_dev
    for parent in path.parents:
        below = os.stat(parent).st_dev
        if below != device:
            return below
    return None
