"""The content of one (ino, version) while somebody reads it or is about to.

Guarded by the reader's lock: `handles`, `fetches`, `waiters`, `loading`, `held`. The rest is set
once, or by one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hsfs.core.errors import HsfsError
from hsfs.core.ports import CachedFile
from hsfs.core.types import BLOCK_SIZE, Extent, FileVersion, Replica
from hsfs.vfs.streams import Streams

# What a `Done` is given is valid only until it returns: it may be a view of a buffer in use.
Data = bytes | bytearray | memoryview
Done = Callable[[Data | HsfsError], None]


class Waiter:
    """A read of [offset, end) that could not be answered at once. `wants_data` is false for those
    who only want the blocks to be in Tier 0."""

    __slots__ = ("attempts", "done", "end", "offset", "wants_data")

    def __init__(self, offset: int, end: int, done: Done, wants_data: bool = True) -> None:
        self.offset = offset
        self.end = end
        self.done = done
        self.attempts = 0
        self.wants_data = wants_data


class Fetch:
    """A block-aligned extent on its way; `since`: when it was asked for (monotonic seconds)."""

    __slots__ = ("content", "extent", "replicas", "since")

    def __init__(
        self, content: Content, extent: Extent, replicas: Sequence[Replica], since: float
    ) -> None:
        self.content = content
        self.extent = extent
        self.replicas = replicas
        self.since = since


class Content:
    """See the module."""

    __slots__ = (
        "around_until",
        "cached",
        "complete",
        "data",
        "fetches",
        "file",
        "guard",
        "handles",
        "held",
        "loading",
        "local",
        "prefetched",
        "read",
        "replicas",
        "stale",
        "streams",
        "waiters",
    )

    def __init__(self, file: FileVersion, replicas: Sequence[Replica], readahead: int) -> None:
        self.file = file
        self.replicas = replicas
        self.cached: CachedFile | None = None
        self.complete = False
        self.data: Data | None = None  # the whole of a small file
        self.handles = 0
        self.loading = False  # a job that brings the whole of a small file is under way
        self.local = False  # `data` came from Tier 0
        self.held = False
        self.prefetched = False  # brought before anybody asked, and not opened yet
        self.read = False  # a read arrived since it was opened
        self.stale = False  # the source has another version
        self.around_until = 0.0  # until then the cache is not tried for it
        self.fetches: list[Fetch] = []
        self.waiters: list[Waiter] = []
        self.streams = Streams(file.size, readahead)
        self.guard = threading.Lock()  # creating the cache file, asking for the version

    def aligned(self, offset: int, end: int) -> Extent:
        """The blocks that [offset, end) touches."""
        start = offset - offset % BLOCK_SIZE
        stop = min(self.file.size, -(-end // BLOCK_SIZE) * BLOCK_SIZE)
        return Extent(start, stop - start)

    def holes(self, extent: Extent) -> Sequence[Extent]:
        """Parts of a block-aligned extent that Tier 0 lacks."""
        if self.complete:
            return ()
        cached = self.cached
        if cached is None:
            return (extent,)
        return cached.missing(extent)

    def unclaimed(self, extent: Extent) -> list[Extent]:
        """Parts of it that Tier 0 lacks and nobody is fetching."""
        result: list[Extent] = []
        for hole in self.holes(extent):
            start, end = hole.offset, hole.end
            pieces = [(start, end)]
            for fetch in self.fetches:
                low, high = fetch.extent.offset, fetch.extent.end
                cut = []
                for left, right in pieces:
                    if high <= left or low >= right:
                        cut.append((left, right))
                        continue
                    if left < low:
                        cut.append((left, low))
                    if high < right:
                        cut.append((high, right))
                pieces = cut
            result.extend(Extent(left, right - left) for left, right in pieces)
        return result
