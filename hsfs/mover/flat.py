"""Cuts the flat, ordered list of an object store's keys into pages of directories. Pure.

Each batch of keys stands for the range of keys from the last one of the batch before to its own
last one; for every directory that the range touches it gives one page that claims just its part.
So a scan can stop behind any batch and go on from the last key alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hsfs.core.errors import Unavailable
from hsfs.core.types import DirectoryPage, FileType, ObjectStat, Place


@dataclass(slots=True)
class _Open:
    """A directory that the walk is in. `after`: raw name up to which pages have claimed it."""

    prefix: bytes
    after: bytes
    last: bytes
    entries: list[ObjectStat] = field(default_factory=list)


class FlatCutter:
    """Stateful over one scan. `after_key`: the last key of an earlier part of it."""

    def __init__(self, device: int, began_ns: int, after_key: bytes = b"") -> None:
        self._device = device
        self._began_ns = began_ns
        self._carried: list[ObjectStat] = []
        self.last_key = after_key
        self._stack = [_Open(b"", b"", b"")]
        if after_key:
            begin = 0
            while (slash := after_key.find(b"/", begin)) >= 0:
                top = self._stack[-1]
                top.after = top.last = after_key[begin : slash + 1]
                self._stack.append(_Open(after_key[: slash + 1], b"", b""))
                begin = slash + 1
            top = self._stack[-1]
            top.after = top.last = after_key[begin:]

    def cut(self, entries: Sequence[ObjectStat], *, end: bool) -> list[DirectoryPage]:
        """The pages of the next batch, parents first. `end`: no key comes behind it.

        Raises Unavailable when the keys are not in order: their ranges would claim wrongly.
        """
        batch = [*self._carried, *entries] if self._carried else list(entries)
        self._carried = []
        # A batch does not end at a marker: its name is empty, which no range can end with.
        while not end and batch and batch[-1].place.key.endswith(b"/"):
            self._carried.insert(0, batch.pop())
        pages: list[DirectoryPage] = []
        stack = self._stack
        top = stack[-1]
        last_key = self.last_key
        for entry in batch:
            key = entry.place.key
            if key <= last_key and last_key:
                raise Unavailable(f"device {self._device}", "lists its keys out of order")
            last_key = key
            while not key.startswith(top.prefix):
                self._page(pages, stack.pop(), b"")
                top = stack[-1]
            begin = len(top.prefix)
            while (slash := key.find(b"/", begin)) >= 0:
                prefix = key[: slash + 1]
                top.entries.append(ObjectStat(key[begin:slash], FileType.DIRECTORY, Place(prefix)))
                top.last = key[begin : slash + 1]
                top = _Open(prefix, b"", b"")
                stack.append(top)
                begin = slash + 1
            name = key[begin:]
            if name or entry.size:  # an empty marker is the directory itself
                top.entries.append(
                    ObjectStat(
                        name,
                        entry.type,
                        entry.place,
                        entry.size,
                        entry.mtime_ns,
                        entry.ctime_ns,
                        entry.version,
                        entry.identity,
                        entry.mode,
                        entry.uid,
                        entry.gid,
                        entry.nlink,
                        entry.target,
                        entry.rdev,
                        entry.strong,
                    )
                )
                top.last = name
        self.last_key = last_key
        if end:
            while stack:
                self._page(pages, stack.pop(), b"")
        else:
            for directory in stack:
                if directory.last != directory.after or directory.entries:
                    self._page(pages, directory, directory.last)
                    directory.after = directory.last
                    directory.entries = []
        pages.sort(key=lambda page: page.directory.key)
        return pages

    def _page(self, pages: list[DirectoryPage], directory: _Open, upto: bytes) -> None:
        pages.append(
            DirectoryPage(
                self._device,
                Place(directory.prefix),
                tuple(directory.entries),
                directory.after,
                upto,
                self._began_ns,
            )
        )
