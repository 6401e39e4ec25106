"""Who reads sequentially and how far to run ahead: pure decisions over the offsets of reads.

Streams belong to a file, not to a handle: forked readers and several threads on one handle each
keep a place of their own. A read that continues a stream (small disorder allowed, the kernel sends
its readahead in parallel) moves it; any other read starts a candidate that fetches nothing ahead
until it has been continued once, so that random access costs the needed blocks only. A read that
touches the end of the file (zip, parquet, npz and safetensors look there first) never starts one.
"""

from __future__ import annotations

from hsfs.core.types import BLOCK_SIZE, CHUNK_SIZE

STREAMS = 8
_DISORDER = 2 * 1024 * 1024
_TAIL = 2 * BLOCK_SIZE
_FIRST = 1024 * 1024


class Stream:
    """One reader's place: `position` behind its furthest read, `ahead` behind what was asked for
    it, `window` the distance to keep between the two."""

    __slots__ = ("ahead", "continued", "position", "window")

    def __init__(self, position: int, ahead: int) -> None:
        self.position = position
        self.ahead = ahead
        self.window = 0
        self.continued = 0


class Streams:
    """The streams of one file of `size` bytes; `limit` bounds every window (bytes)."""

    __slots__ = ("_limit", "_size", "_streams")

    def __init__(self, size: int, limit: int) -> None:
        self._size = size
        self._limit = limit
        self._streams: list[Stream] = []

    def observe(self, offset: int, end: int) -> tuple[int, int]:
        """A read of [offset, end): the half-open range to fetch beyond it (empty when equal)."""
        stream = self._find(offset)
        if stream is None:
            self._start(offset, end)
            if offset == 0 and end < self._size:
                return end, min(self._size, max(end, _FIRST))
            return end, end
        if self._streams[0] is not stream:
            self._streams.remove(stream)
            self._streams.insert(0, stream)
        stream.position = max(stream.position, end)
        stream.continued += 1
        if stream.window == 0:
            stream.window = min(CHUNK_SIZE, self._limit)
        left = stream.ahead - stream.position
        if left * 2 > stream.window:
            return end, end
        # Consumed half of what was fetched for it: the reader is as fast as we are, run further.
        if stream.continued > 1:
            stream.window = min(stream.window * 2, self._limit)
        start = max(stream.ahead, end)
        stop = min(self._size, stream.position + stream.window)
        if stop < self._size:
            stop -= stop % CHUNK_SIZE
        if stop <= start:
            return end, end
        stream.ahead = stop
        return start, stop

    def _find(self, offset: int) -> Stream | None:
        for stream in self._streams:
            if stream.position == offset:
                return stream
            if stream.continued and -_DISORDER <= offset - stream.position <= _DISORDER:
                return stream
        return None

    def _start(self, offset: int, end: int) -> None:
        if end >= self._size or offset >= self._size - _TAIL:
            return
        ahead = max(end, _FIRST) if offset == 0 else end
        self._streams.insert(0, Stream(end, min(ahead, self._size)))
        del self._streams[STREAMS:]
