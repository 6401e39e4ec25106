"""Open files: handles over contents."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import trio

from hsfs.core.errors import HsfsError, IsADirectory, NotSupported, StaleHandle
from hsfs.core.types import FileType, Ino, Node
from hsfs.vfs.attrs import Attrs
from hsfs.vfs.contents import Content, Data, Done
from hsfs.vfs.inodes import Inode, Inodes
from hsfs.vfs.limits import Limits
from hsfs.vfs.names import Names
from hsfs.vfs.reader import Reader
from hsfs.vfs.siblings import Siblings

# So many small files in a row were served by the front's own cache: nothing to fetch ahead for.
_UNREAD = 4


class OpenMode(Enum):
    """How a front is to serve a handle: through its page cache, past it, or by a file of ours."""

    CACHED = "cached"
    DIRECT = "direct"
    PASSTHROUGH = "passthrough"


@dataclass(frozen=True, slots=True)
class Opened:
    """`keep`: pages that the front holds of this inode (and generation) are of this content."""

    fh: int
    mode: OpenMode = OpenMode.CACHED
    backing_fd: int | None = None
    keep: bool = True


class Files:
    """See the module; `*_now` as in `Names`. `load_soon(directory, after)` may be called from any
    thread."""

    def __init__(
        self,
        names: Names,
        attrs: Attrs,
        inodes: Inodes,
        reader: Reader,
        siblings: Siblings,
        limits: Limits,
        load_soon: Callable[[int, bytes], None],
    ) -> None:
        self._names = names
        self._attrs = attrs
        self._inodes = inodes
        self._reader = reader
        self._siblings = siblings
        self._small = limits.small_file
        self._load_soon = load_soon
        self._handles: dict[int, Content] = {}
        self._next = itertools.count(1)
        self._unread = 0  # small files in a row that were closed without a read reaching us

    def __len__(self) -> int:
        return len(self._handles)

    def open_now(self, ino: Ino) -> Opened | None:
        """Raises StaleHandle when `ino` was entered with another content."""
        node = self._names.node_now(ino)
        return None if node is None else self._open(node)

    async def open(self, ino: Ino) -> Opened:
        """Raises NotFound, StaleHandle, IsADirectory, Unavailable."""
        return self._open(await self._names.node(ino))

    def _open(self, node: Node) -> Opened:
        kind = node.attributes.type
        if kind is not FileType.FILE:
            if kind is FileType.DIRECTORY:
                raise IsADirectory("", "a directory")
            raise NotSupported("", "no regular file")
        self._attrs.check(node)
        content = self._reader.acquire(node)
        fh = next(self._next)
        self._handles[fh] = content
        if node.attributes.size <= self._small:
            inode = self._inodes.get(node.attributes.ino)
            if inode is not None and inode.run is not None and self._unread < _UNREAD:
                self._bring_siblings(inode)
        return Opened(fh)

    def _bring_siblings(self, inode: Inode) -> None:
        ahead = self._siblings.opened(inode)
        if ahead.page is not None:
            self._load_soon(ahead.page.directory, ahead.page.last)
        if ahead.inos:
            fresh = self._inodes.fresh
            nodes = [node for node in map(fresh, ahead.inos) if node is not None]
            self._reader.prefetch([n for n in nodes if n.attributes.type is FileType.FILE])

    def read(self, fh: int, offset: int, size: int, done: Done) -> Data | None:
        """See `Reader.read`. Raises StaleHandle for an unknown handle."""
        content = self._handles.get(fh)
        if content is None:
            raise StaleHandle("", "no such handle")
        return self._reader.read(content, offset, size, done)

    async def read_soon(self, fh: int, offset: int, size: int) -> Data:
        """`read` for the event loop; a cancelled call leaves the fetch running."""
        event = trio.Event()
        token = trio.lowlevel.current_trio_token()
        result: list[Data | HsfsError] = []

        def done(outcome: Data | HsfsError) -> None:
            result.append(bytes(outcome) if isinstance(outcome, memoryview) else outcome)
            token.run_sync_soon(event.set)

        data = self.read(fh, offset, size, done)
        if data is not None:
            return data
        await event.wait()
        if isinstance(result[0], HsfsError):
            raise result[0]
        return result[0]

    def release(self, fh: int) -> None:
        """Close a handle; unknown ones are ignored."""
        content = self._handles.pop(fh, None)
        if content is not None:
            if content.read:
                self._unread = 0
            elif content.file.size <= self._small:
                self._unread += 1
            self._reader.release(content)
