"""Sources that exist in memory, for models of the namespace: what they hold, how they list it.

`Flat` is an object store, `Tree` a file system with numbers and handles. `World` asks them as
movers would, with pages of a chosen size, and can be told to fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from hsfs.core.errors import HsfsError, NotADirectory, NotFound
from hsfs.core.types import DirectoryPage, FileType, ObjectStat, Place


class FakeClock:
    """Moves only when told to, but never stands still: two readings differ."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000_000_000_000

    def time_ns(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def monotonic(self) -> float:
        return self.time_ns() / 1e9

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


_serials = itertools.count(1)


@dataclass
class Flat:
    """Objects by key: (version, size)."""

    objects: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    flat = True

    def put(self, key: bytes, size: int = 1) -> None:
        self.objects[key] = (b"v%d" % next(_serials), size)

    def entries(self, key: bytes) -> list[ObjectStat]:
        out: dict[bytes, ObjectStat] = {}
        for full, (version, size) in self.objects.items():
            if not full.startswith(key):
                continue
            rest = full[len(key) :]
            head, slash, _ = rest.partition(b"/")
            if slash:
                out[head + b"/"] = ObjectStat(head, FileType.DIRECTORY, Place(key + head + b"/"))
            elif head or size:
                out[head] = ObjectStat(head, FileType.FILE, Place(full), size, 5, 0, version)
        if key and not out and key not in self.objects:
            raise NotFound("no such prefix")
        return [out[order] for order in sorted(out)]

    def order(self, entry: ObjectStat) -> bytes:
        return entry.name + (b"/" if entry.type is FileType.DIRECTORY else b"")

    def stat(self, place: Place) -> ObjectStat:
        key = place.key
        if not key or key.endswith(b"/"):
            if key and not any(full.startswith(key) for full in self.objects):
                raise NotFound("no such prefix")
            return ObjectStat(key[:-1].rpartition(b"/")[2], FileType.DIRECTORY, Place(key))
        if key not in self.objects:
            raise NotFound("no such key")
        version, size = self.objects[key]
        return ObjectStat(key.rpartition(b"/")[2], FileType.FILE, Place(key), size, 5, 0, version)


@dataclass
class Thing:
    """A file or directory of a Tree."""

    fileid: int
    type: FileType
    version: bytes = b""
    children: dict[bytes, Thing] = field(default_factory=dict)
    links: int = 1
    mtime_ns: int = 0


class Tree:
    """A file system: things have numbers, handles and several names."""

    flat = False

    def __init__(self, handles: bool = True) -> None:
        self.root = Thing(next(_serials), FileType.DIRECTORY)
        self.handles = handles

    def make(self, kind: FileType) -> Thing:
        serial = next(_serials)
        return Thing(serial, kind, b"v%d" % serial, mtime_ns=serial)

    def write(self, thing: Thing) -> None:
        thing.mtime_ns = serial = next(_serials)
        thing.version = b"v%d" % serial

    def find(self, key: bytes) -> Thing:
        at = self.root
        for name in key.split(b"/") if key else ():
            if at.type is not FileType.DIRECTORY:
                raise NotADirectory("not a directory")
            if name not in at.children:
                raise NotFound("no such file")
            at = at.children[name]
        return at

    def directories(self) -> list[tuple[bytes, Thing]]:
        out = [(b"", self.root)]
        for key, at in out:
            for name, child in sorted(at.children.items()):
                if child.type is FileType.DIRECTORY:
                    out.append((key + b"/" + name if key else name, child))
        return out

    def files(self) -> list[tuple[Thing, bytes]]:
        """(directory, name) of all files."""
        return [
            (at, name)
            for _, at in self.directories()
            for name, child in sorted(at.children.items())
            if child.type is not FileType.DIRECTORY
        ]

    def describe(self, name: bytes, key: bytes, thing: Thing) -> ObjectStat:
        number = thing.fileid.to_bytes(8, "big")
        return ObjectStat(
            name,
            thing.type,
            Place(key, b"h" + number if self.handles else b""),
            1 if thing.type is FileType.FILE else 0,
            thing.mtime_ns,
            thing.mtime_ns,
            thing.version if thing.type is FileType.FILE else b"",
            b"F" * 8 + number,
            0o640 if thing.type is FileType.FILE else 0o750,
            7,
            8,
            thing.links,
        )

    def entries(self, key: bytes) -> list[ObjectStat]:
        at = self.find(key)
        if at.type is not FileType.DIRECTORY:
            raise NotADirectory("not a directory")
        lead = key + b"/" if key else b""
        return [self.describe(n, lead + n, t) for n, t in sorted(at.children.items())]

    def order(self, entry: ObjectStat) -> bytes:
        return entry.name

    def stat(self, place: Place) -> ObjectStat:
        return self.describe(place.key.rpartition(b"/")[2], place.key, self.find(place.key))


Source = Flat | Tree


class World:
    """A Surveyor over sources by device number. `page_size` entries per page; `unordered`: trees
    answer as servers do that have no order; `broken`: devices that answer with an error."""

    def __init__(self, sources: dict[int, Source], clock: FakeClock) -> None:
        self.sources = sources
        self.clock = clock
        self.page_size = 1000
        self.unordered = False
        self.broken: dict[int, HsfsError] = {}
        self.lists: list[tuple[int, bytes]] = []
        self.stats: list[tuple[int, bytes]] = []

    def pages(self, device: int, directory: Place) -> list[DirectoryPage]:
        source = self.sources[device]
        as_of_ns = self.clock.time_ns()
        entries = source.entries(directory.key)
        size = self.page_size
        chunks = [entries[at : at + size] for at in range(0, len(entries), size)] or [[]]
        if len(chunks) > 1 and not source.order(chunks[0][-1]):
            chunks[:2] = [chunks[0] + chunks[1]]  # `upto` b"" is the end, not the marker
        pages = []
        if self.unordered and not source.flat:
            for chunk in reversed(chunks):
                page = tuple(reversed(chunk))
                pages.append(
                    DirectoryPage(device, directory, page, as_of_ns=as_of_ns, adds_only=True)
                )
        after = b""
        for at, chunk in enumerate(chunks):
            upto = b"" if at == len(chunks) - 1 else source.order(chunk[-1])
            pages.append(
                DirectoryPage(
                    device,
                    directory,
                    tuple(chunk),
                    after,
                    upto,
                    as_of_ns,
                    names_only=self.unordered and not source.flat,
                )
            )
            after = upto
        return pages

    async def list(self, device, directory):
        self.lists.append((int(device), directory.key))
        if int(device) in self.broken:
            raise self.broken[int(device)]
        for page in self.pages(int(device), directory):
            yield page

    async def stat(self, device, places: Sequence[Place]):
        if int(device) in self.broken:
            raise self.broken[int(device)]
        out: list[ObjectStat | HsfsError] = []
        for place in places:
            self.stats.append((int(device), place.key))
            try:
                out.append(self.sources[int(device)].stat(place))
            except NotFound as error:
                out.append(error)
            except NotADirectory as error:
                out.append(NotFound(str(error)))
        return out
