"""Names and inodes of the tree: answered from what is known while it is fresh, else by the MDS.

`*_now` methods return at once (None = ask) and may be called from any thread; the others run on the
event loop. Pages of listings bring whole nodes, so that looking up, opening and reading what a
listing showed needs no further question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from hsfs.core.errors import NameTooLong, NotADirectory, NotFound
from hsfs.core.ports import Mds
from hsfs.core.types import NAME_MAX, ROOT_INO, FileType, Ino, Name, Node
from hsfs.vfs.counters import Counters
from hsfs.vfs.inodes import Inode, Inodes, Run

PAGE = 256
_ASCENDING = 3
_ASKED = 4
_DIRECTORIES = 256


@dataclass(frozen=True, slots=True)
class NamesPage:
    """Entries of a directory in order, with their nodes. `more` false = the end."""

    names: tuple[bytes, ...]
    nodes: tuple[Node, ...]
    more: bool


class Names:
    """See the module."""

    def __init__(
        self,
        mds: Mds,
        inodes: Inodes,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._mds = mds
        self._inodes = inodes
        self._counters = counters
        self._clock = clock
        self._loading: dict[tuple[int, bytes], trio.Event] = {}
        self._missed: dict[int, tuple[bytes, int]] = {}
        self._asked: dict[int, int] = {}
        self.nursery: trio.Nursery | None = None  # for pages fetched ahead, while the Vfs runs

    def lookup_now(self, parent: Ino, name: Name) -> Node | None:
        """Raises NotFound, NameTooLong."""
        if len(name) > NAME_MAX:
            raise NameTooLong("", f"names have at most {NAME_MAX} bytes")
        node = self._inodes.entry(parent, name)
        if node is not None:
            self._counters.node_hits += 1
        return node

    async def lookup(self, parent: Ino, name: Name) -> Node:
        """Raises NotFound, NotADirectory, NameTooLong, Unavailable."""
        node = self.lookup_now(parent, name)
        if node is not None:
            return node
        self._counters.node_misses += 1
        self._look_ahead(parent, name)
        stamp, sent = self._inodes.stamp(), self._clock()
        try:
            node = await self._mds.lookup(parent, name)
        except NotFound:
            self._inodes.put_absent(parent, name, sent, stamp)
            raise
        self._inodes.put_entry(parent, name, node, sent, stamp)
        return node

    def node_now(self, ino: Ino) -> Node | None:
        """The node while it may be used without asking."""
        node = self._inodes.fresh(ino)
        if node is not None:
            self._counters.node_hits += 1
        return node

    async def node(self, ino: Ino) -> Node:
        """Raises NotFound, Unavailable."""
        node = self.node_now(ino)
        if node is not None:
            return node
        self._counters.node_misses += 1
        inode = self._inodes.get(ino)
        if inode is not None and inode.run is not None and self._worth_listing(inode):
            run = inode.run
            await self.load(Ino(run.directory), run.after)
            node = self._inodes.fresh(ino)
            if node is not None:
                return node
        stamp, sent = self._inodes.stamp(), self._clock()
        node = await self._mds.getattr(ino)
        self._inodes.put(node, sent, stamp)
        return node

    async def resolve(self, path: bytes) -> Node:
        """The node at a path below the root (symlinks are not followed). Raises NotFound,
        NotADirectory, NameTooLong."""
        node = await self.node(ROOT_INO)
        for segment in path.split(b"/"):
            if not segment or segment == b".":
                continue
            if node.attributes.type is not FileType.DIRECTORY:
                raise NotADirectory("", "a segment of the path is no directory")
            node = await self.lookup(Ino(node.attributes.ino), Name(segment))
        return node

    def page_now(self, directory: Ino, after: bytes) -> NamesPage | None:
        """A page whose nodes are all fresh."""
        run = self._inodes.run(directory, after)
        if run is None or run.expires <= self._clock():
            return None
        fresh = self._inodes.fresh
        nodes = []
        for ino in run.inos:
            node = fresh(ino)
            if node is None:
                return None
            nodes.append(node)
        return NamesPage(tuple(run.names), tuple(nodes), run.more)

    async def page(self, directory: Ino, after: bytes) -> NamesPage:
        """The entries behind `after`. Raises NotFound, NotADirectory, Unavailable."""
        page = self.page_now(directory, after)
        if page is not None:
            return page
        stamp, sent = self._inodes.stamp(), self._clock()
        listing = await self._mds.list(directory, Name(after), PAGE)
        self._inodes.put_page(directory, after, listing, sent, stamp)
        return NamesPage(
            tuple(entry.name for entry in listing.entries),
            tuple(entry.node for entry in listing.entries),
            listing.more,
        )

    async def load(self, directory: Ino, after: bytes) -> None:
        """Have the page behind `after` fresh; several callers share one question."""
        key = (directory, after)
        waiting = self._loading.get(key)
        if waiting is not None:
            await waiting.wait()
            return
        event = self._loading[key] = trio.Event()
        try:
            await self.page(directory, after)
        finally:
            del self._loading[key]
            event.set()

    def load_soon(self, directory: int, after: bytes) -> None:
        """On the event loop: fetch a page that will be wanted."""
        if self.nursery is not None and (directory, after) not in self._loading:
            self.nursery.start_soon(self._load_quietly, Ino(directory), after)

    async def _load_quietly(self, directory: Ino, after: bytes) -> None:
        # What fails here fails again, and is told, when somebody asks for it.
        try:
            await self.load(directory, after)
        except (NotFound, NotADirectory):
            pass
        except Exception as error:
            self._counters.errors[f"ahead:{type(error).__name__}"] += 1

    def _look_ahead(self, parent: int, name: bytes) -> None:
        """Names asked for in ascending order: the page that holds the next ones is fetched."""
        last, count = self._missed.pop(parent, (b"", 0))
        count = count + 1 if name > last else 0
        if count >= _ASCENDING:
            count = 0
            self.load_soon(parent, name)
        if len(self._missed) >= _DIRECTORIES:
            del self._missed[next(iter(self._missed))]
        self._missed[parent] = (name, count)

    def _worth_listing(self, inode: Inode) -> bool:
        """Single questions for a few expired nodes, the whole page when many are asked for."""
        run: Run | None = inode.run
        assert run is not None
        count = self._asked.pop(id(run), 0) + 1
        if count >= _ASKED:
            return True
        if len(self._asked) >= _DIRECTORIES:
            del self._asked[next(iter(self._asked))]
        self._asked[id(run)] = count
        return False
