"""Block hashes: what proves that bytes in a cache file are the bytes that were fetched.

One xxh3-128 per 128 KiB block, 16 bytes each, kept in segments of 256 blocks (32 MiB of content,
4 KiB of hashes): the unit in which they are recorded in the index and held in memory. A file of one
segment keeps it; of larger files only the segments in work are in memory.
"""

from __future__ import annotations

from collections.abc import Callable

from xxhash import xxh3_128_digest

from hsfs.core.types import BLOCK_SIZE

HASH_SIZE = 16
SEGMENT_BLOCKS = 256
SEGMENT_SIZE = SEGMENT_BLOCKS * HASH_SIZE


def hash_blocks(data: memoryview) -> bytes:
    """The hashes of consecutive blocks, joined; `data` starts at a block."""
    size = len(data)
    if size <= BLOCK_SIZE:
        return xxh3_128_digest(data)
    return b"".join(
        [xxh3_128_digest(data[at : at + BLOCK_SIZE]) for at in range(0, size, BLOCK_SIZE)]
    )


def matches(data: bytes, digest: bytes) -> bool:
    """Whether a block is what was hashed."""
    return xxh3_128_digest(data) == digest


class BlockHashes:
    """The hashes of one file. Not thread-safe: guarded by its file's lock.

    `load(segment)` gives a recorded segment or None; it is called for segments not in memory.
    """

    __slots__ = ("_dirty", "_load", "_segments", "single")

    def __init__(
        self, blocks: int, load: Callable[[int], bytes | None], first: bytes | None = None
    ) -> None:
        self.single = blocks <= SEGMENT_BLOCKS
        self._load = load
        self._segments: dict[int, bytearray] = {}
        self._dirty: set[int] = set()
        if self.single:
            self._segments[0] = bytearray(first or blocks * HASH_SIZE)

    def put(self, first: int, digests: bytes) -> None:
        """Set the hashes of consecutive blocks."""
        at = 0
        while at < len(digests):
            segment, index = divmod(first + at // HASH_SIZE, SEGMENT_BLOCKS)
            start = index * HASH_SIZE
            take = min(len(digests) - at, SEGMENT_SIZE - start)
            self._segment(segment)[start : start + take] = digests[at : at + take]
            self._dirty.add(segment)
            at += take

    def get(self, block: int) -> bytes:
        """The hash of a block (zeros when none was ever set)."""
        segment, index = divmod(block, SEGMENT_BLOCKS)
        start = index * HASH_SIZE
        return bytes(self._segment(segment)[start : start + HASH_SIZE])

    def whole(self) -> bytes:
        """All hashes of a file of a single segment."""
        return bytes(self._segments[0])

    def take_dirty(self) -> list[tuple[int, bytes]]:
        """Segments that changed since the last call (large files); now owned by the caller, who
        gives them back with `settle` or `redo`."""
        taken = [(n, bytes(self._segments[n])) for n in sorted(self._dirty)]
        self._dirty.clear()
        return taken

    def redo(self, segments: list[tuple[int, bytes]]) -> None:
        """Recording failed: they are dirty still."""
        self._dirty.update(n for n, _ in segments)

    def settle(self) -> None:
        """What was taken is recorded: clean segments of large files leave the memory."""
        if not self.single:
            self._segments = {n: s for n, s in self._segments.items() if n in self._dirty}

    def _segment(self, number: int) -> bytearray:
        found = self._segments.get(number)
        if found is None:
            found = bytearray(self._load(number) or SEGMENT_SIZE)
            if len(found) != SEGMENT_SIZE:
                found = bytearray(SEGMENT_SIZE)
            self._segments[number] = found
        return found
