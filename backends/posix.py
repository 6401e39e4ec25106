"""The `file://` backend: a directory of this machine, read in place.

Every path is walked segment by segment with openat and O_NOFOLLOW, so that no symbolic link leads
out of the root; nothing but regular files is ever opened for reading. No descriptor outlives a
call: the source can be unmounted, and what is deleted there gives its space back at once. Reads
compare fstat before and after with the expected version.

System calls may hang when the directory lies on a network mount: they run in threads that can be
left behind (`posix_guard` says how).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat as stat_
import threading
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar
from urllib.parse import unquote_to_bytes, urlsplit

import trio

from hsfs.backends.filestat import ServerClock, pack_identity, pack_version, settled
from hsfs.backends.posix_guard import Guard, may_hang
from hsfs.core.errors import (
    ConfigError,
    HsfsError,
    IsADirectory,
    NotADirectory,
    NotFound,
    NotSupported,
    StaleVersion,
    TimedOut,
    Unauthorised,
    Unavailable,
    UsageError,
    from_os_error,
)
from hsfs.core.ports import Interrupt
from hsfs.core.types import (
    Capabilities,
    Cursor,
    DeviceId,
    FileType,
    ObjectStat,
    Page,
    Place,
    Space,
    Version,
)

T = TypeVar("T")

_PAGE = 1000
_NAMES = 20_000  # names taken from the kernel in one hop
_THREADS = 16
_READ_MAX = 8 * 1024 * 1024
_CONCURRENCY = 8
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: should a FIFO take the file's place between the look and the open, nothing waits.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_TYPES = {
    stat_.S_IFREG: FileType.FILE,
    stat_.S_IFDIR: FileType.DIRECTORY,
    stat_.S_IFLNK: FileType.SYMLINK,
    stat_.S_IFIFO: FileType.FIFO,
    stat_.S_IFSOCK: FileType.SOCKET,
    stat_.S_IFCHR: FileType.CHARACTER,
    stat_.S_IFBLK: FileType.BLOCK,
}


class PosixBackend:
    """A local directory. Options: timeout (seconds). Raises UsageError, ConfigError."""

    def __init__(
        self, *, device: DeviceId, url: str, options: Mapping[str, str | int | float | bool]
    ) -> None:
        parts = urlsplit(url)
        root = unquote_to_bytes(parts.path)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost") or root[:1] != b"/":
            raise UsageError(url, "not a URL of a local directory", "write file:///DIRECTORY")
        if b"\0" in root:
            raise UsageError(url, "a path with a zero byte")
        try:
            self._timeout_s = float(options.get("timeout", 30.0))
        except ValueError as error:
            raise ConfigError(url, f"timeout: {error}") from error
        if self._timeout_s <= 0:
            raise ConfigError(url, f"timeout {self._timeout_s:g} s")
        self._device = device
        self._url = url
        self._root = os.path.normpath(root)
        self._limiter = trio.CapacityLimiter(_THREADS)
        self._guarded = may_hang(self._root)
        self._guard = Guard(url)
        self._clock = ServerClock()
        self._closed = False
        self._caps = Capabilities(
            flat=False,
            ordered=True,
            strong_versions=False,
            has_handles=False,
            pinned_reads=True,
            concurrency=_CONCURRENCY,
            read_max=_READ_MAX,
        )

    @property
    def device(self) -> DeviceId:
        return self._device

    @property
    def caps(self) -> Capabilities:
        return self._caps

    async def stat(self, place: Place) -> ObjectStat:
        return await self._run(lambda: self._stat(place.key))

    async def scan(self, directory: Place, *, after: Cursor | None = None) -> AsyncIterator[Page]:
        key = directory.key
        names = _Names()
        try:
            while await self._run(lambda: names.take(lambda: self._open_directory(key))):
                pass
        finally:
            names.leave()
        found = await self._run(lambda: sorted(names.found))
        start = bisect_right(found, after) if after else 0
        while True:
            part = found[start : start + _PAGE]
            entries = await self._run(lambda part=part: self._describe_all(key, names, part))  # type: ignore[misc]
            start += _PAGE
            if start >= len(found):
                yield Page(tuple(entries))
                return
            yield Page(tuple(entries), part[-1])

    async def probe(self) -> Space:
        return await self._run(self._probe)

    async def aclose(self) -> None:
        self._closed = True
        await trio.lowlevel.checkpoint()

    def read_into(
        self,
        place: Place,
        offset: int,
        buf: memoryview,
        /,
        *,
        expect: Version | None,
        interrupt: Interrupt,
    ) -> int:
        self._check_open()
        key = place.key
        if not self._guarded:
            with self._errors("file"):
                return self._read(key, offset, buf, expect)

        def detached() -> bytearray:
            own = bytearray(len(buf))
            with self._errors("file"), memoryview(own) as view:
                n = self._read(key, offset, view, expect)
            del own[n:]
            return own

        data = self._guard.run(detached, self._timeout_s, interrupt)
        buf[: len(data)] = data
        return len(data)

    # In worker threads.

    async def _run(self, work: Callable[[], T]) -> T:
        self._check_open()

        def checked() -> T:
            with self._errors("file"):
                return work()

        with trio.move_on_after(self._timeout_s):
            return await trio.to_thread.run_sync(
                checked, abandon_on_cancel=True, limiter=self._limiter
            )
        raise TimedOut(self._url, f"the file system does not answer for {self._timeout_s:g} s")

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(self._url, "closed")

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(error, what) from error

    def _error(self, error: OSError, what: str) -> HsfsError:
        why = error.strerror or str(error)
        if error.errno in (errno.EACCES, errno.EPERM):
            return Unauthorised(what, why, "run hsfs as a user who may read the directory")
        if error.errno == errno.ELOOP:
            return NotADirectory(what, "a symbolic link")
        return from_os_error(error, what)

    def _open_directory(self, key: bytes) -> int:
        """An O_PATH descriptor. Raises OSError, NotFound, NotADirectory."""
        try:
            fd = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._error(error, self._url) from error
        try:
            for segment in key.split(b"/") if key else ():
                below = os.open(_checked(segment), _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextlib.contextmanager
    def _parent(self, key: bytes) -> Iterator[tuple[int, bytes]]:
        """(descriptor of the directory above, checked last segment)."""
        above, slash, name = key.rpartition(b"/")
        if slash and not above:
            raise NotFound("name", "no name of a file")
        fd = self._open_directory(above)
        try:
            yield fd, _checked(name)
        finally:
            os.close(fd)

    def _stat(self, key: bytes) -> ObjectStat:
        if not key:
            fd = self._open_directory(b"")
            try:
                return self._describe(b"", os.stat(fd), b"")
            finally:
                os.close(fd)
        with self._parent(key) as (fd, name):
            return self._look(key, fd, name)

    def _look(self, key: bytes, fd: int, name: bytes) -> ObjectStat:
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        target = b""
        if stat_.S_ISLNK(found.st_mode):
            target = os.readlink(name, dir_fd=fd)
        return self._describe(key, found, target)

    def _describe(self, key: bytes, found: os.stat_result, target: bytes) -> ObjectStat:
        kind = _TYPES.get(stat_.S_IFMT(found.st_mode))
        if kind is None:
            raise NotSupported("file", f"file type {stat_.S_IFMT(found.st_mode):o}")
        file = kind is FileType.FILE
        old_enough = self._clock.settled if self._guarded else settled
        return ObjectStat(
            name=key.rpartition(b"/")[2],
            type=kind,
            place=Place(key),
            size=found.st_size,
            mtime_ns=found.st_mtime_ns,
            ctime_ns=found.st_ctime_ns,
            version=_version(found) if file else b"",
            identity=pack_identity(found.st_dev, found.st_ino),
            mode=stat_.S_IMODE(found.st_mode),
            uid=found.st_uid,
            gid=found.st_gid,
            nlink=found.st_nlink,
            target=target,
            rdev=found.st_rdev,
            strong=old_enough(found.st_ctime_ns) if file else True,
        )

    def _describe_all(self, key: bytes, names: _Names, part: Sequence[bytes]) -> list[ObjectStat]:
        prefix = key + b"/" if key else b""
        fd = self._open_directory(key)
        try:
            here = os.stat(fd)
            if (here.st_dev, here.st_ino) != names.identity:
                raise StaleVersion("directory", "replaced while it was listed")
            entries = []
            for name in part:
                try:
                    entries.append(self._look(prefix + name, fd, name))
                except FileNotFoundError:
                    continue  # gone since its name was read
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    # Was a symbolic link between two calls; describe what it has become.
                    entries.append(self._look(prefix + name, fd, name))
            return entries
        finally:
            os.close(fd)

    def _probe(self) -> Space:
        try:
            fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._error(error, self._url) from error
        try:
            space = os.fstatvfs(fd)
        finally:
            os.close(fd)
        unit = space.f_frsize
        return Space(
            total=space.f_blocks * unit,
            free=space.f_bfree * unit,
            available=space.f_bavail * unit,
            files=space.f_files,
            files_free=space.f_ffree,
        )

    def _read(self, key: bytes, offset: int, buf: memoryview, expect: Version | None) -> int:
        try:
            fd = self._open_file(key, expect)
        except (NotFound, NotADirectory, FileNotFoundError, NotADirectoryError) as error:
            if expect is None:
                raise
            raise StaleVersion("file", "gone from its backend") from error
        try:
            before = _version(os.fstat(fd))
            if expect is not None and before != expect:
                raise StaleVersion("file", "changed on its backend")
            done = 0
            while done < len(buf):
                n = os.preadv(fd, [buf[done:]], offset + done)
                if n == 0:
                    break
                done += n
            if _version(os.fstat(fd)) != before:
                raise StaleVersion("file", "changed on its backend while it was read")
            return done
        finally:
            os.close(fd)

    def _open_file(self, key: bytes, expect: Version | None) -> int:
        if not key:
            raise IsADirectory("file")
        with self._parent(key) as (parent, name):
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            _check_regular(found, expect)
            try:
                # Reading leaves no trace on the source where we may ask for that.
                fd = os.open(name, _FILE | os.O_NOATIME, dir_fd=parent)
            except PermissionError:
                fd = os.open(name, _FILE, dir_fd=parent)
        try:
            _check_regular(os.fstat(fd), expect)
        except BaseException:
            os.close(fd)
            raise
        return fd


class _Names:
    """Names of a directory, taken in hops. The scanning task may leave while a hop hangs in the
    kernel: whoever is last closes the iterator."""

    def __init__(self) -> None:
        self.found: list[bytes] = []
        self.identity = (0, 0)
        self._lock = threading.Lock()
        self._entries: Iterator[os.DirEntry[bytes]] | None = None
        self._left = False
        self._busy = False

    def take(self, open_directory: Callable[[], int]) -> bool:
        """One hop; whether there are more."""
        with self._lock:
            self._busy = True
        try:
            if self._entries is None:
                fd = open_directory()
                try:
                    here = os.stat(fd)
                    self.identity = (here.st_dev, here.st_ino)
                    # By a path of bytes: from a descriptor, scandir gives decoded names.
                    self._entries = os.scandir(b"/proc/self/fd/%d" % fd)
                finally:
                    os.close(fd)
            names = [entry.name for entry in islice(self._entries, _NAMES)]
            self.found += names
            return len(names) == _NAMES
        finally:
            with self._lock:
                self._busy = False
                close = self._left
            if close:
                self._close()

    def leave(self) -> None:
        """No more hops will be asked for."""
        with self._lock:
            self._left = True
            close = not self._busy
        if close:
            self._close()

    def _close(self) -> None:
        if self._entries is not None:
            self._entries.close()  # type: ignore[attr-defined]


def _checked(segment: bytes) -> bytes:
    if segment in (b"", b".", b"..") or b"\0" in segment or b"/" in segment:
        raise NotFound("name", "no name of a file")
    return segment


def _version(found: os.stat_result) -> Version:
    return pack_version(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _check_regular(found: os.stat_result, expect: Version | None) -> None:
    if stat_.S_ISREG(found.st_mode):
        return
    if expect is not None:
        raise StaleVersion("file", "replaced on its backend")
    if stat_.S_ISDIR(found.st_mode):
        raise IsADirectory("file")
    if stat_.S_ISLNK(found.st_mode):
        raise NotADirectory("file", "a symbolic link")
    raise NotSupported("file", "not a regular file")


async def open_posix(
    device: DeviceId, url: str, options: Mapping[str, str | int | float | bool]
) -> PosixBackend:
    """The backend of a `file:///DIRECTORY` URL; the directory is opened at the first use."""
    return PosixBackend(device=device, url=url, options=options)
