"""Bounds of one front: what it may hold in memory and how far it may run ahead of its readers.

Reads of large files go through the cache's own buffers and reads around a cache in trouble are
bounded by the threads that make them, so that memory is spent in two places only: nodes, and small
files that are held for their next reader. Each has its share of `memory_limit` here.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """`memory_limit` is in bytes for the whole process; the properties are shares of it.

    `readahead`: how far (bytes) a sequential stream is fetched ahead of its reader.
    `small_file`: files up to this size (bytes) are fetched whole, in one go.
    `siblings`: at most so many files of one directory are fetched before they are asked for.
    `negative_ttl_s`: how long an absent name is believed absent without a push saying otherwise.
    """

    memory_limit: int = 512 * MIB
    readahead: int = 32 * MIB
    small_file: int = MIB
    siblings: int = 32
    negative_ttl_s: float = 1.0

    @property
    def nodes(self) -> int:
        """Nodes kept at most (about 1 KiB each)."""
        return max(1024, self.memory_limit // 8192)

    @property
    def held(self) -> int:
        """Bytes of small files held in memory for their next reader."""
        return max(4 * MIB, self.memory_limit // 16)
