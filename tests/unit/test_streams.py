import random

from hypothesis import given
from hypothesis import strategies as st

from hsfs.core.types import BLOCK_SIZE, CHUNK_SIZE
from hsfs.vfs.streams import Streams

MIB = 1 << 20


def drive(size, reads, limit=32 * MIB):
    """Bytes fetched for a list of (offset, length), as the reader would: whole blocks, once."""
    streams = Streams(size, limit)
    there: set[int] = set()
    for offset, length in reads:
        end = min(offset + length, size)
        start, stop = streams.observe(offset, end)
        for low, high in ((offset, end), (start, stop)):
            if high > low:
                there.update(range(low // BLOCK_SIZE, -(-high // BLOCK_SIZE)))
    return len(there) * BLOCK_SIZE


def test_sequential_reads_fetch_the_file_once():
    size = 64 * MIB
    fetched = drive(size, [(offset, MIB) for offset in range(0, size, MIB)])
    assert fetched <= size


def test_a_sequential_reader_is_run_ahead_of():
    streams = Streams(1 << 30, 32 * MIB)
    furthest = 0
    for offset in range(0, 64 * MIB, MIB):
        _, stop = streams.observe(offset, offset + MIB)
        furthest = max(furthest, stop)
        assert furthest - offset <= 33 * MIB + CHUNK_SIZE
    assert furthest >= 64 * MIB + 8 * MIB


def test_the_window_is_bounded():
    streams = Streams(1 << 30, 4 * MIB)
    for offset in range(0, 64 * MIB, 128 * 1024):
        _, stop = streams.observe(offset, offset + 128 * 1024)
        assert stop <= offset + 6 * MIB


def test_random_small_reads_fetch_one_block_each():
    rng = random.Random(1)
    size = 1 << 30
    offsets = rng.sample(range(0, size // 4096), 500)
    fetched = drive(size, [(offset * 4096, 4096) for offset in offsets])
    assert fetched <= 32 * 500 * 4096


def test_random_block_sized_reads_fetch_at_most_twice():
    rng = random.Random(2)
    size = 1 << 30
    reads = [(rng.randrange(0, size - BLOCK_SIZE), BLOCK_SIZE) for _ in range(300)]
    fetched = drive(size, reads)
    assert fetched <= 2 * 300 * BLOCK_SIZE + 8 * BLOCK_SIZE


def test_tail_first_opens_start_no_stream():
    size = 100 * MIB
    streams = Streams(size, 32 * MIB)
    start, stop = streams.observe(size - 65536, size)
    assert start == stop
    start, stop = streams.observe(size - 200_000, size - 190_000)
    assert start == stop
    start, stop = streams.observe(size - 190_000, size - 180_000)
    assert start == stop


def test_two_interleaved_readers_are_both_run_ahead_of():
    streams = Streams(1 << 30, 32 * MIB)
    ahead = {0: 0, 512 * MIB: 0}
    for step in range(16):
        for base in ahead:
            offset = base + step * MIB
            _, stop = streams.observe(offset, offset + MIB)
            ahead[base] = max(ahead[base], stop)
    for base, stop in ahead.items():
        assert stop > base + 18 * MIB


def test_disorder_of_parallel_readahead_is_the_same_stream():
    streams = Streams(1 << 30, 32 * MIB)
    furthest = 0
    order = [0, 1, 2, 4, 3, 5, 7, 6, 8, 9, 11, 10]
    for step in order:
        _, stop = streams.observe(step * MIB, (step + 1) * MIB)
        furthest = max(furthest, stop)
    assert furthest > 16 * MIB


@given(
    st.integers(1, 1 << 30),
    st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, MIB)), max_size=30),
)
def test_what_is_asked_for_lies_in_the_file(size, reads):
    streams = Streams(size, 32 * MIB)
    for offset, length in reads:
        if offset >= size:
            continue
        end = min(offset + length, size)
        start, stop = streams.observe(offset, end)
        assert end <= start <= stop <= size or start == stop
