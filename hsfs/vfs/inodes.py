"""What this front knows of the tree and what its kernel knows of it: nodes, names, pages, lookups.

Three things with different lives:

- an `Inode` lives as long as the kernel holds a reference (exact lookup counts) or its node is
  cached. `told` (a fingerprint of the version) and `generation` are what the kernel was told: one
  (ino, generation) is one content version for ever. A file whose version changed is entered again
  with the next generation; the kernel then makes a fresh inode under the same number and fails the
  old one's handles, pages included, so that no reader ever sees a mix of two versions.
- its `node` (attributes, version, replicas) may be used until `expires` on the monotonic clock,
  counted from when the request was *sent*. Nodes are bounded; the least recently used go first.
- names: positive and negative entries, and the pages of listings (`Run`), which also say what comes
  next in a directory, for those who fetch ahead.

A kernel may hold millions of inodes for which nobody asks any more. `settle`, called when the front
is idle, drops what has expired and packs the rest into arrays of 24 bytes per inode (`Settled`).

A push that arrives while a reply is under way wins: `stamp()` before asking, and what a push has
touched since is used once and not kept.

Called from several threads. Single dictionary operations are atomic; whatever needs more holds
the lock, which is never held across a call out of this module.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from hsfs.core.errors import NotFound
from hsfs.core.ports import Listing
from hsfs.core.types import Node

_RECENT = 4096
_SETTLE_MIN = 1024


def fingerprint(version: bytes) -> int:
    """64 bits of a keyed hash: two versions of one file share it once in 2^64 changes."""
    return hash(version)


class Inode:
    """One inode; see the module. `run` and `position`: its place in a page of a directory."""

    __slots__ = ("expires", "generation", "ino", "lookups", "node", "position", "run", "told")

    def __init__(self, ino: int) -> None:
        self.ino = ino
        self.lookups = 0
        self.generation = 0
        self.told = 0
        self.node: Node | None = None
        self.expires = 0.0
        self.run: Run | None = None
        self.position = 0


class Run:
    """A page of a directory: the entries behind `after`, in order. `expires` as for nodes."""

    __slots__ = ("after", "directory", "expires", "inos", "more", "names")

    def __init__(
        self,
        directory: int,
        after: bytes,
        names: list[bytes],
        inos: list[int],
        more: bool,
        expires: float,
    ) -> None:
        self.directory = directory
        self.after = after
        self.names = names
        self.inos = inos
        self.more = more
        self.expires = expires

    @property
    def last(self) -> bytes:
        """The name behind which the next page begins."""
        return self.names[-1] if self.names else self.after


class Settled:
    """Inodes that only the kernel holds, packed and sorted; lookups 0 = not there any more."""

    __slots__ = ("count", "generations", "inos", "lookups", "told")

    def __init__(self, inodes: Iterable[Inode] = ()) -> None:
        ordered = sorted(inodes, key=lambda inode: inode.ino)
        self.inos = array("Q", (inode.ino for inode in ordered))
        self.lookups = array("I", (inode.lookups for inode in ordered))
        self.generations = array("I", (inode.generation for inode in ordered))
        self.told = array("q", (inode.told for inode in ordered))
        self.count = len(ordered)

    def take(self, ino: int) -> Inode | None:
        """Unpack one; it is no longer here."""
        at = bisect_left(self.inos, ino)
        if at >= len(self.inos) or self.inos[at] != ino or not self.lookups[at]:
            return None
        inode = Inode(ino)
        inode.lookups = self.lookups[at]
        inode.generation = self.generations[at]
        inode.told = self.told[at]
        self.lookups[at] = 0
        self.count -= 1
        return inode

    def take_all(self) -> list[Inode]:
        """Unpack all."""
        found = (self.take(ino) for ino in self.inos)
        return [inode for inode in found if inode is not None]


class Inodes:
    """The table; `nodes` bounds cached nodes, `clock` is monotonic seconds."""

    def __init__(self, nodes: int, negative_ttl_s: float, clock: Callable[[], float]) -> None:
        self._limit = nodes
        self._negative_ttl_s = negative_ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._inodes: dict[int, Inode] = {}
        self._settled = Settled()
        self._cached: dict[int, Inode] = {}  # those with a node, least recently put first
        self._entries: dict[tuple[int, bytes], tuple[int, float]] = {}
        self._runs: dict[int, dict[bytes, Run]] = {}
        self._run_count = 0
        self._pushes = 0
        self._touched: dict[int, int] = {}  # ino -> push number
        self._floor = 0  # replies asked for before this push are never kept

    def __len__(self) -> int:
        return len(self._inodes) + self._settled.count

    @property
    def cached(self) -> int:
        """Number of nodes held."""
        return len(self._cached)

    @property
    def held_by_kernel(self) -> int:
        """Number of inodes that the kernel holds references to."""
        with self._lock:
            active = sum(inode.lookups > 0 for inode in self._inodes.values())
            return active + self._settled.count

    # -- reading ---------------------------------------------------------------------------------

    def get(self, ino: int) -> Inode | None:
        """The inode if anything is known of it."""
        inode = self._inodes.get(ino)
        if inode is None and self._settled.count:
            with self._lock:
                return self._find(ino)
        return inode

    def _find(self, ino: int) -> Inode | None:
        inode = self._inodes.get(ino)
        if inode is None and self._settled.count:
            inode = self._settled.take(ino)
            if inode is not None:
                self._inodes[ino] = inode
        return inode

    def fresh(self, ino: int) -> Node | None:
        """Its node while it may be used without asking."""
        inode = self._inodes.get(ino)
        if inode is None or inode.expires <= self._clock():
            return None
        return inode.node

    def remaining(self, ino: int) -> float:
        """For how many seconds the node of `ino` may still be used."""
        inode = self._inodes.get(ino)
        if inode is None or inode.node is None:
            return 0.0
        return max(0.0, inode.expires - self._clock())

    def entry(self, parent: int, name: bytes) -> Node | None:
        """The node that `name` is known to lead to; None = ask. Raises NotFound where the name is
        known to be absent."""
        found = self._entries.get((parent, name))
        if found is None or found[1] <= self._clock():
            return None
        if not found[0]:
            raise NotFound("", "no such name")
        return self.fresh(found[0])

    def absent_for(self, parent: int, name: bytes) -> float:
        """For how many seconds `name` may still be believed absent."""
        ino, expires = self._entries.get((parent, name), (1, 0.0))
        return 0.0 if ino else max(0.0, expires - self._clock())

    def run(self, directory: int, after: bytes) -> Run | None:
        """The page behind `after`, fresh or not."""
        runs = self._runs.get(directory)
        return runs.get(after) if runs else None

    def next_run(self, run: Run) -> Run | None:
        """The page that follows."""
        return self.run(run.directory, run.last) if run.more else None

    # -- what replies bring ----------------------------------------------------------------------

    def stamp(self) -> int:
        """Taken before a request is sent and handed in with its reply."""
        return self._pushes

    def put(self, node: Node, sent: float, stamp: int) -> Inode:
        """Keep a reply's node; `sent`: when it was asked for."""
        with self._lock:
            inode = self._put(node, sent, stamp)
            if len(self._cached) > self._limit:
                self._trim()
        return inode

    def put_entry(self, parent: int, name: bytes, node: Node, sent: float, stamp: int) -> Inode:
        """Keep a lookup's reply."""
        with self._lock:
            inode = self._put(node, sent, stamp)
            if self._keep(parent, stamp):
                self._entries[parent, name] = (node.attributes.ino, sent + node.ttl_s)
            if len(self._cached) > self._limit:
                self._trim()
            if len(self._entries) > self._limit:
                self._trim_entries()
        return inode

    def put_absent(self, parent: int, name: bytes, sent: float, stamp: int) -> None:
        """Keep that a name is absent."""
        with self._lock:
            if not self._keep(parent, stamp):
                return
            self._entries[parent, name] = (0, sent + self._negative_ttl_s)
            if len(self._entries) > self._limit:
                self._trim_entries()

    def put_page(
        self, directory: int, after: bytes, listing: Listing, sent: float, stamp: int
    ) -> Run:
        """Keep a page with all its nodes and names."""
        names: list[bytes] = []
        inos: list[int] = []
        expires = sent + 3600.0
        with self._lock:
            keep = self._keep(directory, stamp)
            run = Run(directory, after, names, inos, listing.more, 0.0)
            for position, entry in enumerate(listing.entries):
                node = entry.node
                inode = self._put(node, sent, stamp)
                inode.run = run
                inode.position = position
                names.append(entry.name)
                inos.append(node.attributes.ino)
                until = sent + node.ttl_s
                if keep:
                    self._entries[directory, entry.name] = (node.attributes.ino, until)
                expires = min(expires, until)
            if keep:
                run.expires = expires
                self._add_run(run)
            if len(self._cached) > self._limit:
                self._trim()
            if len(self._entries) > self._limit:
                self._trim_entries()
        return run

    def _put(self, node: Node, sent: float, stamp: int) -> Inode:
        ino = node.attributes.ino
        inode = self._find(ino)
        if inode is None:
            inode = self._inodes[ino] = Inode(ino)
        old = inode.node
        if old is not None and old.change > node.change and inode.expires > self._clock():
            return inode  # an older reply came later
        if old is None:
            self._cached[ino] = inode
        inode.node = node
        inode.expires = sent + node.ttl_s if self._keep(ino, stamp) else 0.0
        return inode

    def _keep(self, ino: int, stamp: int) -> bool:
        return stamp >= self._floor and self._touched.get(ino, 0) <= stamp

    def _add_run(self, run: Run) -> None:
        runs = self._runs.setdefault(run.directory, {})
        if run.after not in runs:
            self._run_count += 1
        runs[run.after] = run
        while self._run_count * 256 > max(self._limit, 1024):
            oldest = next(iter(self._runs))
            if oldest == run.directory:
                if len(self._runs) == 1:
                    # One huge directory: keep what was read last.
                    first = next(iter(runs))
                    del runs[first]
                    self._run_count -= 1
                    continue
                self._runs[oldest] = self._runs.pop(oldest)
                continue
            self._run_count -= len(self._runs.pop(oldest))

    def _trim(self) -> None:
        for ino in list(self._cached)[: max(1, self._limit // 16)]:
            self._drop_node(ino)

    def _trim_entries(self) -> None:
        for key in list(self._entries)[: max(1, self._limit // 16)]:
            del self._entries[key]

    def _drop_node(self, ino: int) -> None:
        inode = self._cached.pop(ino, None)
        if inode is None:
            return
        inode.node = None
        inode.expires = 0.0
        if inode.lookups <= 0:
            self._inodes.pop(ino, None)

    # -- what the kernel knows -------------------------------------------------------------------

    def enter(self, node: Node) -> int:
        """The kernel is told of `node` by an entry: one more lookup; the generation to tell it."""
        ino = node.attributes.ino
        version = fingerprint(node.version)
        with self._lock:
            inode = self._find(ino)
            if inode is None:
                inode = self._inodes[ino] = Inode(ino)
            if inode.lookups <= 0:
                inode.told = version
            elif inode.told != version:
                inode.generation = (inode.generation + 1) & 0x7FFFFFFF
                inode.told = version
            inode.lookups += 1
            return inode.generation

    def forget(self, forgotten: Iterable[tuple[int, int]]) -> None:
        """The kernel dropped so many lookups of each (ino, count)."""
        with self._lock:
            for ino, count in forgotten:
                inode = self._find(ino)
                if inode is None:
                    continue
                inode.lookups -= count
                if inode.lookups <= 0:
                    inode.lookups = 0
                    if inode.node is None:
                        del self._inodes[ino]

    def known(self, ino: int) -> bool:
        """Whether the kernel holds a reference."""
        inode = self.get(ino)
        return inode is not None and inode.lookups > 0

    def moved_on(self, node: Node) -> bool:
        """Whether the kernel knows the inode with another content than the node's."""
        inode = self.get(node.attributes.ino)
        if inode is None or inode.lookups <= 0:
            return False
        return inode.told != fingerprint(node.version)

    def known_names(self, limit: int) -> Sequence[tuple[int, bytes]]:
        """Names that were told (the most recent `limit` of them), to be taken back."""
        with self._lock:
            return list(self._entries)[-limit:]

    # -- rest ------------------------------------------------------------------------------------

    def settle(self) -> int:
        """Drop what has expired and pack what only the kernel holds; the number of things that
        were dropped or packed."""
        now = self._clock()
        with self._lock:
            before = len(self._cached) + len(self._entries) + len(self._inodes)
            for ino in [ino for ino, inode in self._cached.items() if inode.expires <= now]:
                self._drop_node(ino)
            # Copies, as a dictionary never shrinks by itself.
            self._cached = dict(self._cached)
            self._entries = {k: v for k, v in self._entries.items() if v[1] > now}
            for directory, runs in list(self._runs.items()):
                live = {after: run for after, run in runs.items() if run.expires > now}
                self._run_count -= len(runs) - len(live)
                if live:
                    self._runs[directory] = live
                else:
                    del self._runs[directory]
            at_rest = [inode for inode in self._inodes.values() if inode.node is None]
            if len(at_rest) >= _SETTLE_MIN:
                self._settled = Settled(self._settled.take_all() + at_rest)
                kept = {i: inode for i, inode in self._inodes.items() if inode.node is not None}
                self._inodes = kept
            return before - len(self._cached) - len(self._entries) - len(self._inodes)

    # -- pushes ----------------------------------------------------------------------------------

    def invalidate(self, ino: int) -> None:
        """The inode itself changed."""
        with self._lock:
            self._touch(ino)
            inode = self._inodes.get(ino)
            if inode is not None:
                inode.expires = 0.0

    def invalidate_entry(self, directory: int, name: bytes) -> None:
        """A name of a directory changed; so did the directory."""
        with self._lock:
            self._touch(directory)
            self._entries.pop((directory, name), None)
            self._run_count -= len(self._runs.pop(directory, ()))
            inode = self._inodes.get(directory)
            if inode is not None:
                inode.expires = 0.0

    def invalidate_all(self) -> None:
        """Nothing that was learnt before may be used without asking."""
        with self._lock:
            self._pushes += 1
            self._floor = self._pushes
            self._touched.clear()
            self._entries.clear()
            self._runs.clear()
            self._run_count = 0
            for inode in self._cached.values():
                inode.expires = 0.0

    def expire(self, ino: int) -> None:
        """Ask before the node is used again (a read met another version)."""
        inode = self._inodes.get(ino)
        if inode is not None:
            inode.expires = 0.0

    def forget_name(self, parent: int, name: bytes) -> None:
        """Ask before the name is used again."""
        self._entries.pop((parent, name), None)

    def _touch(self, ino: int) -> None:
        self._pushes += 1
        if len(self._touched) >= _RECENT:
            self._touched.clear()
            self._floor = self._pushes
        self._touched[ino] = self._pushes
