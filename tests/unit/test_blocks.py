"""Block arithmetic against the plainest model there is: sets of byte offsets, scaled down."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hsfs.core import blocks
from hsfs.core.types import BLOCK_SIZE, CHUNK_SIZE, Extent

SIZES = st.one_of(
    st.integers(0, 3 * CHUNK_SIZE),
    st.builds(
        lambda n, d: max(0, n * BLOCK_SIZE + d), st.integers(0, 80), st.sampled_from([-1, 0, 1])
    ),
)
EXTENTS = st.builds(Extent, st.integers(0, 4 * CHUNK_SIZE), st.integers(0, 2 * CHUNK_SIZE))
SMALL = st.builds(Extent, st.integers(0, 40), st.integers(0, 20))


def bytes_of(extents):
    return {b for e in extents for b in range(e.offset, e.end)}


@given(SIZES)
def test_blocks_tile_the_file(size):
    ends = 0
    for index in range(blocks.block_count(size)):
        extent = blocks.block_extent(index, size)
        assert extent.offset == ends
        assert 0 < extent.length <= BLOCK_SIZE
        assert blocks.is_aligned(extent, size)
        ends = extent.end
    assert ends == size


@given(EXTENTS, SIZES)
def test_align_grows_to_whole_blocks_and_no_further(extent, size):
    inside = blocks.clip(extent, size)
    grown = blocks.align(extent, size)
    assert blocks.is_aligned(grown, size)
    if inside.length:
        assert grown.offset <= inside.offset
        assert grown.end >= inside.end
        assert grown.length < inside.length + 2 * BLOCK_SIZE
    else:
        assert grown.length == 0


@given(EXTENTS, SIZES)
def test_span_touches_exactly_the_blocks(extent, size):
    inside = blocks.clip(extent, size)
    first, last = blocks.block_span(inside.offset, inside.length)
    touched = [
        i
        for i in range(blocks.block_count(size))
        if blocks.block_extent(i, size).end > inside.offset
        and blocks.block_extent(i, size).offset < inside.end
        and inside.length
    ]
    assert touched == list(range(first, last))


@given(EXTENTS, st.sampled_from([BLOCK_SIZE, CHUNK_SIZE, 1 << 20]))
def test_split_tiles_and_stays_within_a_step(extent, step):
    pieces = list(blocks.split(extent, step))
    position = extent.offset
    for piece in pieces:
        assert piece.offset == position
        assert piece.length > 0
        assert piece.offset // step == (piece.end - 1) // step
        position = piece.end
    assert position == extent.end


@given(st.integers(1, 3 * CHUNK_SIZE), st.data())
def test_chunk_of_a_byte(size, data):
    offset = data.draw(st.integers(0, size - 1))
    chunk = blocks.chunk_extent(offset, size)
    assert chunk.offset <= offset < chunk.end
    assert chunk.offset % CHUNK_SIZE == 0
    assert chunk.end % CHUNK_SIZE == 0 or chunk.end == size


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, BLOCK_SIZE), st.data())
def test_missing_is_the_zero_blocks(states, tail, data):
    size = (len(states) - 1) * BLOCK_SIZE + tail
    extent = Extent(data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))
    first, last = blocks.block_span(extent.offset, blocks.clip(extent, size).length)
    expected = [i for i in range(first, last) if states[i] == 0]
    holes = blocks.missing(bytearray(states), extent, size)
    found = []
    for hole in holes:
        assert blocks.is_aligned(hole, size)
        found += range(*blocks.block_span(hole.offset, hole.length))
    assert found == expected
    assert holes == blocks.merge(holes)


@given(st.lists(SMALL, max_size=8))
def test_merge_keeps_the_bytes(extents):
    merged = blocks.merge(extents)
    assert bytes_of(merged) == bytes_of(extents)
    assert all(a.end < b.offset for a, b in itertools.pairwise(merged))


@given(SMALL, st.lists(SMALL, max_size=8))
def test_subtract_takes_the_bytes(extent, taken):
    left = blocks.subtract(extent, taken)
    assert bytes_of(left) == bytes_of([extent]) - bytes_of(taken)
    assert left == blocks.merge(left)


def test_missing_of_a_whole_file_is_one_hole():
    size = 10 * BLOCK_SIZE + 5
    assert blocks.missing(bytearray(11), Extent(0, size), size) == [Extent(0, size)]
    assert blocks.missing(bytearray(b"\1" * 11), Extent(0, size), size) == []
