"""Arithmetic of blocks, chunks and extents: pure, no I/O.

A file of `size` bytes is cut into blocks of 128 KiB (the last one short) and chunks of 4 MiB. Block
indices and byte ranges are half-open. A *state map* is a bytearray with one byte per block, 0 for a
missing block: one byte and not one bit, because finding, counting and marking are then single
calls that run at memory speed (1 TiB needs 8 MiB).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hsfs.core.types import BLOCK_SIZE, CHUNK_SIZE, Extent

BLOCKS_PER_CHUNK = CHUNK_SIZE // BLOCK_SIZE

_ZEROS = re.compile(b"\0+")


def block_count(size: int) -> int:
    """Number of blocks of a file."""
    return -(-size // BLOCK_SIZE)


def block_span(offset: int, length: int) -> tuple[int, int]:
    """Indices [first, last) of the blocks that the bytes touch (an empty range touches none)."""
    first = offset // BLOCK_SIZE
    return first, first if length <= 0 else -(-(offset + length) // BLOCK_SIZE)


def span_extent(first: int, last: int, size: int) -> Extent:
    """Bytes of the blocks [first, last) of a file of `size` bytes."""
    start = first * BLOCK_SIZE
    return Extent(start, max(0, min(last * BLOCK_SIZE, size) - start))


def block_extent(index: int, size: int) -> Extent:
    """Bytes of one block."""
    return span_extent(index, index + 1, size)


def clip(extent: Extent, size: int) -> Extent:
    """The part of the extent that lies within the file; empty behind its end."""
    start = min(max(extent.offset, 0), size)
    return Extent(start, max(0, min(extent.end, size) - start))


def align(extent: Extent, size: int) -> Extent:
    """The extent grown outwards to whole blocks and cut at the end of the file."""
    inside = clip(extent, size)
    if not inside.length:
        return Extent(inside.offset // BLOCK_SIZE * BLOCK_SIZE, 0)
    return span_extent(*block_span(inside.offset, inside.length), size)


def is_aligned(extent: Extent, size: int) -> bool:
    """Whether the extent consists of whole blocks of the file."""
    return (
        extent.offset >= 0
        and extent.length >= 0
        and extent.offset % BLOCK_SIZE == 0
        and extent.end <= size
        and (extent.end % BLOCK_SIZE == 0 or extent.end == size)
    )


def chunk_extent(offset: int, size: int) -> Extent:
    """The chunk that holds the byte at `offset`."""
    return clip(Extent(offset // CHUNK_SIZE * CHUNK_SIZE, CHUNK_SIZE), size)


def split(extent: Extent, step: int = CHUNK_SIZE) -> Iterator[Extent]:
    """The extent cut at the multiples of `step` within the file."""
    offset = extent.offset
    while offset < extent.end:
        end = min(extent.end, (offset // step + 1) * step)
        yield Extent(offset, end - offset)
        offset = end


def zero_runs(states: bytes | bytearray, first: int, last: int) -> list[tuple[int, int]]:
    """Runs [first, last) of missing blocks within [first, last) of a state map."""
    return [found.span() for found in _ZEROS.finditer(states, first, last)]


def missing(states: bytes | bytearray, extent: Extent, size: int) -> list[Extent]:
    """Holes of the extent, grown to whole blocks."""
    inside = clip(extent, size)
    first, last = block_span(inside.offset, inside.length)
    if states.find(0, first, last) < 0:
        return []
    return [span_extent(a, b, size) for a, b in zero_runs(states, first, last)]


def merge(extents: Iterable[Extent]) -> list[Extent]:
    """The same bytes as sorted extents that neither touch nor overlap."""
    merged: list[Extent] = []
    for extent in sorted(extents, key=lambda e: e.offset):
        if not extent.length:
            continue
        if merged and extent.offset <= merged[-1].end:
            last = merged[-1]
            merged[-1] = Extent(last.offset, max(last.end, extent.end) - last.offset)
        else:
            merged.append(extent)
    return merged


def subtract(extent: Extent, taken: Iterable[Extent]) -> list[Extent]:
    """What is left of the extent without the bytes of `taken`."""
    left: list[Extent] = []
    position = extent.offset
    for other in merge(taken):
        if other.end <= position:
            continue
        if other.offset >= extent.end:
            break
        if other.offset > position:
            left.append(Extent(position, other.offset - position))
        position = other.end
    if position < extent.end:
        left.append(Extent(position, extent.end - position))
    return left
