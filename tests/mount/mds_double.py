"""A metadata server in memory, for tests of the fronts: a dict tree filled from a backend.

Knows what it was last told (`assimilate`, `refresh`), as the real one does: a source that changes
is noticed by `revalidate`, `refresh` or when the test says so.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import trio

from hsfs.core.errors import HsfsError, NotADirectory, NotFound
from hsfs.core.ports import Backend, Device, Invalidation, Listing
from hsfs.core.types import (
    Attributes,
    DeviceId,
    Entry,
    FileType,
    Ino,
    Name,
    Node,
    ObjectStat,
    Place,
    Replica,
    Space,
    Version,
)


@dataclass(slots=True)
class _Inode:
    ino: int
    parent: int
    name: bytes
    stat: ObjectStat
    change: int = 1
    children: dict[bytes, int] = field(default_factory=dict)
    order: list[bytes] | None = None


class MdsDouble:
    """One backend at the root. `ttl_s`: for how long its nodes may be used. `calls` counts what was
    asked; `offline` makes every question fail with that error."""

    def __init__(self, backend: Backend, *, ttl_s: float = 30.0, delay_s: float = 0.0) -> None:
        self.backend = backend
        self.ttl_s = ttl_s
        self.delay_s = delay_s
        self.offline: HsfsError | None = None
        self.calls: dict[str, int] = {}
        self.reports: list[tuple[int, str]] = []
        self._send, self._receive = trio.open_memory_channel[Sequence[Invalidation]](1 << 16)
        root = ObjectStat(b"", FileType.DIRECTORY, Place(b""), mode=0o755)
        self._inodes: dict[int, _Inode] = {1: _Inode(1, 1, b"", root)}
        self._next = 2

    # -- what the test does ----------------------------------------------------------------------

    async def assimilate(self, push: bool = False) -> int:
        """Take over the backend's tree as it is now; with `push`, tell the client what differs."""
        changes: list[Invalidation] = []
        seen = 0
        waiting = [1]
        while waiting:
            directory = self._inodes[waiting.pop()]
            found: dict[bytes, ObjectStat] = {}
            async for page in self.backend.scan(directory.stat.place):
                found.update((entry.name, entry) for entry in page.entries)
            for name in [name for name in directory.children if name not in found]:
                self._inodes.pop(directory.children.pop(name))
                directory.order = None
                changes.append(Invalidation(directory.ino, name))
            for name, stat in found.items():
                seen += 1
                changes += self._take(directory, name, stat)
                if stat.type is FileType.DIRECTORY:
                    waiting.append(directory.children[name])
        if push and changes:
            await self._send.send(changes)
        return seen

    def _take(self, directory: _Inode, name: bytes, stat: ObjectStat) -> list[Invalidation]:
        ino = directory.children.get(name)
        old = self._inodes.get(ino) if ino is not None else None
        if old is not None and old.stat.type is stat.type:
            if old.stat == stat:
                return []
            old.stat = stat
            old.change += 1
            return [Invalidation(old.ino)]
        ino, self._next = self._next, self._next + 1
        self._inodes[ino] = _Inode(ino, directory.ino, name, stat)
        directory.children[name] = ino
        directory.order = None
        return [Invalidation(directory.ino, name)]

    async def push(self, *changes: Invalidation) -> None:
        """Send an up-call."""
        await self._send.send(changes)

    # -- Mds -------------------------------------------------------------------------------------

    async def _asked(self, what: str) -> None:
        self.calls[what] = self.calls.get(what, 0) + 1
        if self.delay_s:
            await trio.sleep(self.delay_s)
        else:
            await trio.lowlevel.checkpoint()
        if self.offline is not None:
            raise self.offline

    def _inode(self, ino: int) -> _Inode:
        try:
            return self._inodes[ino]
        except KeyError:
            raise NotFound("inode", "gone") from None

    def _node(self, inode: _Inode) -> Node:
        stat = inode.stat
        directory = stat.type is FileType.DIRECTORY
        attributes = Attributes(
            inode.ino,
            stat.type,
            stat.mode if stat.mode >= 0 else (0o755 if directory else 0o644),
            max(stat.uid, 0),
            max(stat.gid, 0),
            stat.nlink,
            4096 if directory else stat.size,
            stat.mtime_ns,
            stat.mtime_ns,
            stat.ctime_ns or stat.mtime_ns,
            stat.rdev,
        )
        is_file = stat.type is FileType.FILE
        replica = Replica(self.backend.device, stat.place, stat.version)
        return Node(
            attributes,
            version=stat.version if is_file else b"",
            change=inode.change,
            as_of_ns=time.time_ns(),
            ttl_s=self.ttl_s,
            replicas=(replica,) if is_file else (),
            target=stat.target,
            parent=inode.parent if directory else 0,
        )

    async def lookup(self, parent: Ino, name: Name) -> Node:
        await self._asked("lookup")
        directory = self._inode(parent)
        if directory.stat.type is not FileType.DIRECTORY:
            raise NotADirectory("inode")
        try:
            return self._node(self._inode(directory.children[name]))
        except KeyError:
            raise NotFound("name") from None

    async def getattr(self, ino: Ino) -> Node:
        await self._asked("getattr")
        return self._node(self._inode(ino))

    async def list(self, ino: Ino, after: Name, limit: int) -> Listing:
        await self._asked("list")
        directory = self._inode(ino)
        if directory.stat.type is not FileType.DIRECTORY:
            raise NotADirectory("inode")
        if directory.order is None:
            directory.order = sorted(directory.children)
        names = directory.order
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if names[middle] > after:
                high = middle
            else:
                low = middle + 1
        chosen = names[low : low + limit]
        entries = tuple(
            Entry(name, self._node(self._inodes[directory.children[name]])) for name in chosen
        )
        return Listing(entries, low + limit < len(names))

    async def revalidate(self, ino: Ino, version: Version) -> Node:
        await self._asked("revalidate")
        inode = self._inode(ino)
        try:
            stat = await self.backend.stat(inode.stat.place)
        except NotFound:
            self._inodes.pop(ino, None)
            parent = self._inodes[inode.parent]
            parent.children.pop(inode.name, None)
            parent.order = None
            raise
        self._take(self._inodes[inode.parent], inode.name, stat)
        return self._node(self._inode(ino))

    async def refresh(self, ino: Ino, recursive: bool) -> int:
        await self._asked("refresh")
        return await self.assimilate(push=True)

    async def devices(self) -> Sequence[Device]:
        await self._asked("devices")
        return (Device(self.backend.device, "source", "file:///", "/", {}),)

    async def space(self) -> Space:
        await self._asked("space")
        return Space(1 << 40, 1 << 39, 1 << 39)

    async def report(self, device: DeviceId, state: str, why: str) -> None:
        self.reports.append((device, state))

    def invalidations(self) -> AsyncIterator[Sequence[Invalidation]]:
        return self._receive.__aiter__()
