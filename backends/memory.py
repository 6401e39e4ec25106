"""A backend that lives in memory, for tests of the layers above: flat or hierarchical.

The source is changed through `write`, `remove`, `mkdir`, `symlink` and `rename`, which stand for
the native tools of a real backend. All of it is safe to call from any thread.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from hsfs.backends.filestat import pack_identity
from hsfs.core.errors import (
    IsADirectory,
    NotADirectory,
    NotFound,
    NotSupported,
    StaleVersion,
    Unavailable,
    UsageError,
)
from hsfs.core.ports import Interrupt
from hsfs.core.types import (
    Capabilities,
    Cursor,
    DeviceId,
    FileType,
    Key,
    ObjectStat,
    Page,
    Place,
    Space,
    Version,
)

_CAPACITY = 1 << 40
_CURSOR_START = b"s"


@dataclass(slots=True)
class _Thing:
    """A file (or other leaf) or a directory; `serial` is its fileid."""

    type: FileType
    serial: int
    data: bytes = b""
    version: bytes = b""
    mtime_ns: int = 0
    mode: int = 0o644
    target: bytes = b""
    children: dict[bytes, _Thing] = field(default_factory=dict)


class MemoryBackend:
    """`flat` behaves as an object store (keys, prefixes), else as a tree of directories.

    `page` is the number of entries of one page of a listing.
    """

    def __init__(
        self,
        device: DeviceId,
        *,
        flat: bool = False,
        page: int = 1000,
        concurrency: int = 8,
    ) -> None:
        self._device = device
        self._page = page
        self._lock = threading.Lock()
        self._serials = itertools.count(2)
        self._root = _Thing(FileType.DIRECTORY, 1, mode=0o755)
        self._objects: dict[bytes, _Thing] = {}
        self._closed = False
        self._caps = Capabilities(
            flat=flat,
            ordered=True,
            strong_versions=True,
            has_handles=False,
            pinned_reads=True,
            concurrency=concurrency,
            read_max=8 << 20,
            flat_list=flat,
        )

    @property
    def device(self) -> DeviceId:
        return self._device

    @property
    def caps(self) -> Capabilities:
        return self._caps

    # The source's own tools.

    def write(
        self,
        key: bytes,
        data: bytes,
        *,
        version: bytes | None = None,
        mtime_ns: int | None = None,
        mode: int = 0o644,
    ) -> ObjectStat:
        """Make or overwrite a file; directories above it are made. An overwritten file keeps its
        identity and gets a new version (`version` when given)."""
        stamp = time.time_ns() if mtime_ns is None else mtime_ns
        with self._lock:
            thing = self._make(key, FileType.FILE)
            thing.data = bytes(data)
            thing.version = version if version is not None else b"v%d" % next(self._serials)
            thing.mtime_ns = stamp
            thing.mode = mode
            return self._stat_of(key, thing)

    def mkdir(self, key: bytes) -> None:
        """Make a directory and those above it."""
        with self._lock:
            self._make(key, FileType.DIRECTORY)

    def symlink(self, key: bytes, target: bytes) -> None:
        """Make a symbolic link."""
        with self._lock:
            self._make(key, FileType.SYMLINK).target = target

    def remove(self, key: bytes) -> None:
        """Remove a file, or a directory with all that it holds. Raises NotFound."""
        with self._lock:
            if self._caps.flat:
                if self._objects.pop(key, None) is None:
                    raise NotFound("key")
                return
            parent, name = self._parent(key)
            if parent.children.pop(name, None) is None:
                raise NotFound("key")

    def rename(self, old: bytes, new: bytes) -> None:
        """Move a file or directory, replacing what is there; identity and version stay."""
        with self._lock:
            if self._caps.flat:
                self._objects[new] = self._objects.pop(old)
                return
            parent, name = self._parent(old)
            thing = parent.children[name]
            into, new_name = self._parent(new)
            del parent.children[name]
            into.children[new_name] = thing

    # Backend.

    async def stat(self, place: Place) -> ObjectStat:
        self._check_open()
        with self._lock:
            return self._stat_of(place.key, self._find(place.key))

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
        with self._lock:
            try:
                thing = self._find(place.key)
            except (NotFound, NotADirectory):
                if expect is None:
                    raise
                raise StaleVersion("file", "gone from its backend") from None
            if expect is not None and thing.version != expect:
                raise StaleVersion("file", "changed on its backend")
            if thing.type is FileType.DIRECTORY:
                raise IsADirectory("file")
            if thing.type is not FileType.FILE:
                raise NotSupported("file", "not a regular file")
            data = memoryview(thing.data)[offset : offset + len(buf)]
        buf[: len(data)] = data
        return len(data)

    async def scan(self, directory: Place, *, after: Cursor | None = None) -> AsyncIterator[Page]:
        self._check_open()
        with self._lock:
            entries = self._entries(directory.key)
        start = 0
        if after is not None:
            names = [entry.name + entry.place.key[-1:] for entry in entries]
            start = next((i for i, n in enumerate(names) if _CURSOR_START + n > after), len(names))
        for first in range(start, max(len(entries), start + 1), self._page):
            page = tuple(entries[first : first + self._page])
            last = first + self._page >= len(entries)
            cursor = b"" if last else _CURSOR_START + page[-1].name + page[-1].place.key[-1:]
            yield Page(page, cursor)

    async def list_flat(self, prefix: Place, *, after: Cursor | None = None) -> AsyncIterator[Page]:
        """All objects below the prefix, in order of their keys (flat only)."""
        self._check_open()
        if not self._caps.flat:
            raise NotSupported("flat listing", "this backend has directories")
        with self._lock:
            stats = [
                self._stat_of(key, thing, name=b"")
                for key, thing in sorted(self._objects.items())
                if key.startswith(prefix.key) and (after is None or key > after)
            ]
        for first in range(0, max(len(stats), 1), self._page):
            page = tuple(stats[first : first + self._page])
            last = first + self._page >= len(stats)
            yield Page(page, b"" if last else page[-1].place.key)

    async def probe(self) -> Space:
        self._check_open()
        with self._lock:
            used = _bytes_below(self._root) + sum(len(t.data) for t in self._objects.values())
        return Space(total=_CAPACITY, free=_CAPACITY - used, available=_CAPACITY - used)

    async def aclose(self) -> None:
        self._closed = True

    # Inside, under the lock.

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("memory backend", "closed")

    def _make(self, key: bytes, kind: FileType) -> _Thing:
        if self._caps.flat:
            if kind is not FileType.FILE:
                raise OSError(errno.EOPNOTSUPP, "object stores hold objects only")
            fresh = _Thing(kind, next(self._serials))
            return self._objects.setdefault(key, fresh)
        here = self._root
        segments = key.split(b"/")
        for segment in segments[:-1]:
            here = here.children.setdefault(
                segment, _Thing(FileType.DIRECTORY, next(self._serials), mode=0o755)
            )
        mode = 0o755 if kind is FileType.DIRECTORY else 0o644
        fresh = _Thing(kind, next(self._serials), mtime_ns=time.time_ns(), mode=mode)
        return here.children.setdefault(segments[-1], fresh)

    def _parent(self, key: bytes) -> tuple[_Thing, bytes]:
        above, _, name = key.rpartition(b"/")
        return self._find(above), name

    def _find(self, key: bytes) -> _Thing:
        if self._caps.flat:
            if key == b"" or key.endswith(b"/"):
                if key and not any(k.startswith(key) for k in self._objects):
                    raise NotFound("prefix")
                return _Thing(FileType.DIRECTORY, 0)
            if key not in self._objects:
                raise NotFound("key")
            return self._objects[key]
        here = self._root
        for segment in key.split(b"/") if key else ():
            if here.type is not FileType.DIRECTORY:
                raise NotADirectory("key")
            if segment not in here.children:
                raise NotFound("key")
            here = here.children[segment]
        return here

    def _entries(self, key: bytes) -> list[ObjectStat]:
        if not self._caps.flat:
            here = self._find(key)
            if here.type is not FileType.DIRECTORY:
                raise NotADirectory("key")
            prefix = key + b"/" if key else b""
            return [
                self._stat_of(prefix + name, child) for name, child in sorted(here.children.items())
            ]
        found: dict[bytes, ObjectStat] = {}
        for full, thing in sorted(self._objects.items()):
            if not full.startswith(key):
                continue
            name, slash, _ = full[len(key) :].partition(b"/")
            if slash:
                below = key + name + b"/"
                if below not in found:
                    found[below] = ObjectStat(name, FileType.DIRECTORY, Place(below))
            else:
                found[full] = self._stat_of(full, thing, name=name)
        return list(found.values())

    def _stat_of(self, key: bytes, thing: _Thing, *, name: bytes | None = None) -> ObjectStat:
        flat = self._caps.flat
        if name is None:
            name = key.rstrip(b"/").rpartition(b"/")[2] if flat else key.rpartition(b"/")[2]
        size = len(thing.target if thing.type is FileType.SYMLINK else thing.data)
        return ObjectStat(
            name=name,
            type=thing.type,
            place=Place(Key(key)),
            size=size,
            mtime_ns=thing.mtime_ns,
            ctime_ns=thing.mtime_ns,
            version=thing.version,
            identity=b"" if flat else pack_identity(0, thing.serial),
            mode=-1 if flat else thing.mode,
            uid=-1 if flat else 0,
            gid=-1 if flat else 0,
            target=thing.target,
        )


def _bytes_below(thing: _Thing) -> int:
    return len(thing.data) + sum(_bytes_below(child) for child in thing.children.values())


async def open_memory(
    device: DeviceId, url: str, options: Mapping[str, str | int | float | bool]
) -> MemoryBackend:
    """An empty `memory:` backend. Options: `flat`, `concurrency`. Raises UsageError."""
    if not url.startswith("memory:"):
        raise UsageError(url, "not a memory: URL")
    flat = options.get("flat", False)
    return MemoryBackend(
        device, flat=flat in (True, "true", 1), concurrency=int(options.get("concurrency", 8))
    )
