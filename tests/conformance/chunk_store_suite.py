"""What every ChunkStore must do, as functions over one empty store of 64 MiB: `case(store)`.

`FileVersion`s are made by `file`, whose content is known by (ino, version, size), so that any read
can be checked without keeping bytes.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable

import pytest
import xxhash

from hsfs.core.blocks import align
from hsfs.core.errors import Corrupt, NoSpace, Unavailable
from hsfs.core.ports import CachedFile, ChunkStore
from hsfs.core.types import BLOCK_SIZE, CHUNK_SIZE, Extent, FileVersion, Ino, Version

SIZE = 64 << 20  # of the store under test

Case = Callable[[ChunkStore], None]


def file(ino: int, size: int, version: bytes = b"v1") -> FileVersion:
    return FileVersion(Ino(ino), Version(version), size)


def content(of: FileVersion, offset: int = 0, length: int | None = None) -> bytes:
    """The bytes that this file has: a 4 KiB pattern of its own per block."""
    end = of.size if length is None else min(of.size, offset + length)
    parts = []
    at = offset
    while at < end:
        block = at // BLOCK_SIZE
        seed = xxhash.xxh3_64_digest(b"%d/%s/%d/%d" % (of.ino, of.version, of.size, block))
        pattern = seed * 512
        stop = min(end, (block + 1) * BLOCK_SIZE)
        shift = at % 4096
        need = stop - at
        parts.append((pattern * (need // 4096 + 2))[shift : shift + need])
        at = stop
    return b"".join(parts)


class Source:
    """Fills from the known content; counts, and fails on request."""

    def __init__(self, of: FileVersion) -> None:
        self.of = of
        self.bytes = 0
        self.calls: list[tuple[int, int]] = []
        self.fail_at: int | None = None
        self.short_at: int | None = None

    def read(self, offset: int, view: memoryview) -> int:
        self.calls.append((offset, len(view)))
        if self.fail_at is not None and offset >= self.fail_at:
            raise Unavailable("source", "gone")
        data = content(self.of, offset, len(view))
        if self.short_at is not None and offset + len(data) > self.short_at:
            data = data[: max(0, self.short_at - offset)]
        view[: len(data)] = data
        self.bytes += len(data)
        return len(data)


def whole(of: FileVersion) -> Extent:
    return Extent(0, of.size)


def read_all(handle: CachedFile) -> bytes:
    return handle.read(0, handle.file.size)


def cached(store: ChunkStore, of: FileVersion) -> CachedFile:
    """A handle with everything filled."""
    handle = store.create(of)
    handle.fill(whole(of), Source(of).read)
    return handle


# -- find and create


def unknown_files_are_not_found(store: ChunkStore) -> None:
    assert store.find(file(7, 10)) is None
    assert store.cached_bytes(file(7, 10)) == 0
    usage = store.usage()
    assert (usage.bytes, usage.files, usage.size, usage.trouble) == (0, 0, SIZE, "")


def a_created_file_misses_everything(store: ChunkStore) -> None:
    f = file(7, 3 * BLOCK_SIZE + 1)
    handle = store.create(f)
    assert handle.file == f
    assert not handle.complete
    assert list(handle.missing(whole(f))) == [whole(f)]
    assert handle.read_cached(0, 10) is None
    with pytest.raises(Corrupt):
        handle.read(0, 10)
    handle.release()


def a_filled_file_is_complete_and_reads_back(store: ChunkStore) -> None:
    for size in (1, 4095, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 5 * BLOCK_SIZE + 77):
        f = file(100 + size, size)
        handle = cached(store, f)
        assert handle.complete
        assert list(handle.missing(whole(f))) == []
        assert read_all(handle) == content(f)
        assert store.cached_bytes(f) == size
        handle.release()


def an_empty_file_is_complete_at_once(store: ChunkStore) -> None:
    f = file(8, 0)
    handle = store.create(f)
    assert handle.complete
    assert list(handle.missing(Extent(0, 100))) == []
    assert handle.read(0, 100) == b""
    assert handle.read_cached(0, 100) == b""
    handle.fill(Extent(0, 0), Source(f).read)
    handle.release()
    found = store.find(f)
    assert found is not None
    assert found.complete
    found.release()


def find_pins_what_create_made(store: ChunkStore) -> None:
    f = file(7, 2 * BLOCK_SIZE)
    handle = cached(store, f)
    other = store.find(f)
    assert other is not None
    assert other.complete
    handle.release()
    assert read_all(other) == content(f)
    other.release()
    again = store.find(f)
    assert again is not None
    assert read_all(again) == content(f)
    again.release()


def create_finds_what_is_there(store: ChunkStore) -> None:
    f = file(7, 2 * BLOCK_SIZE)
    cached(store, f).release()
    again = store.create(f)
    assert again.complete
    assert read_all(again) == content(f)
    again.release()
    assert store.usage().files == 1


def versions_are_apart(store: ChunkStore) -> None:
    old, new = file(7, 5000, b"v1"), file(7, 5000, b"v2")
    first = cached(store, old)
    assert store.find(new) is None
    second = cached(store, new)
    assert read_all(first) == content(old)
    assert read_all(second) == content(new)
    assert content(old) != content(new)
    first.release()
    second.release()


def a_size_belongs_to_the_version(store: ChunkStore) -> None:
    cached(store, file(7, 5000)).release()
    assert store.find(file(7, 5001)) is None


def release_is_idempotent(store: ChunkStore) -> None:
    f = file(7, 5000)
    one, two = store.create(f), store.create(f)
    assert store.usage().pinned == 1
    one.release()
    one.release()
    assert store.usage().pinned == 1
    two.release()
    assert store.usage().pinned == 0


# -- fill and read


def fill_takes_parts_in_any_order(store: ChunkStore) -> None:
    f = file(7, 3 * CHUNK_SIZE + 999)
    source = Source(f)
    handle = store.create(f)
    tail = align(Extent(f.size - 1, 1), f.size)
    handle.fill(tail, source.read)
    assert handle.read(tail.offset, tail.length) == content(f, tail.offset)
    middle = Extent(5 * BLOCK_SIZE, 3 * BLOCK_SIZE)
    handle.fill(middle, source.read)
    assert handle.read(middle.offset, middle.length) == content(f, middle.offset, middle.length)
    assert list(handle.missing(whole(f))) == [
        Extent(0, middle.offset),
        Extent(middle.end, tail.offset - middle.end),
    ]
    assert list(handle.missing(Extent(middle.offset + 5, BLOCK_SIZE))) == []
    assert list(handle.missing(Extent(middle.end - 1, 2))) == [Extent(middle.end, BLOCK_SIZE)]
    assert store.cached_bytes(f) == middle.length + tail.length
    for hole in handle.missing(whole(f)):
        handle.fill(hole, source.read)
    assert handle.complete
    assert source.bytes == f.size
    assert read_all(handle) == content(f)
    handle.release()


def fill_asks_for_pieces_of_at_most_1_mib_in_order(store: ChunkStore) -> None:
    f = file(7, CHUNK_SIZE + 5)
    source = Source(f)
    handle = store.create(f)
    handle.fill(whole(f), source.read)
    assert all(0 < length <= 1 << 20 for _, length in source.calls)
    at = 0
    for offset, length in source.calls:
        assert offset == at
        at += length
    assert at == f.size
    handle.release()


def fill_does_not_fetch_again_what_is_there(store: ChunkStore) -> None:
    f = file(7, 8 * BLOCK_SIZE)
    source = Source(f)
    handle = store.create(f)
    handle.fill(Extent(2 * BLOCK_SIZE, BLOCK_SIZE), source.read)
    handle.fill(whole(f), source.read)
    handle.fill(whole(f), source.read)
    assert source.bytes == f.size
    handle.release()


def fill_refuses_half_blocks(store: ChunkStore) -> None:
    f = file(7, 2 * BLOCK_SIZE + 5)
    handle = store.create(f)
    for extent in (Extent(1, BLOCK_SIZE), Extent(0, 5), Extent(2 * BLOCK_SIZE, BLOCK_SIZE)):
        with pytest.raises(ValueError, match="blocks"):
            handle.fill(extent, Source(f).read)
    assert list(handle.missing(whole(f))) == [whole(f)]
    handle.release()


def a_failed_fill_keeps_the_blocks_before(store: ChunkStore) -> None:
    f = file(7, CHUNK_SIZE)
    source = Source(f)
    source.fail_at = 2 << 20
    handle = store.create(f)
    with pytest.raises(Unavailable):
        handle.fill(whole(f), source.read)
    assert list(handle.missing(whole(f))) == [Extent(2 << 20, 2 << 20)]
    assert handle.read(0, 2 << 20) == content(f, 0, 2 << 20)
    source.fail_at = None
    handle.fill(whole(f), source.read)
    assert read_all(handle) == content(f)
    handle.release()


def a_short_read_is_corrupt_and_marks_nothing(store: ChunkStore) -> None:
    f = file(7, 2 * BLOCK_SIZE)
    source = Source(f)
    source.short_at = BLOCK_SIZE + 10
    handle = store.create(f)
    with pytest.raises(Corrupt):
        handle.fill(whole(f), source.read)
    assert handle.read_cached(BLOCK_SIZE, 10) is None
    with pytest.raises(Corrupt):
        handle.read(BLOCK_SIZE, 10)
    handle.release()


def reads_end_at_the_end_of_the_file(store: ChunkStore) -> None:
    f = file(7, BLOCK_SIZE + 100)
    handle = cached(store, f)
    assert handle.read(f.size - 10, 100) == content(f, f.size - 10)
    assert handle.read(f.size, 100) == b""
    assert handle.read(f.size + 1, 100) == b""
    assert handle.read_cached(f.size, 100) == b""
    assert handle.read(5, 0) == b""
    for offset, size in ((0, 1), (3, 4000), (1, 70_000), (BLOCK_SIZE - 5, 10)):
        now = handle.read_cached(offset, size)
        assert now is None or now == content(f, offset, size)
    handle.release()


def disjoint_fills_from_many_threads(store: ChunkStore) -> None:
    f = file(7, 24 << 20)
    handle = store.create(f)
    failures: list[BaseException] = []

    def work(part: int) -> None:
        try:
            for n in range(part, f.size // CHUNK_SIZE, 3):
                extent = Extent(n * CHUNK_SIZE, CHUNK_SIZE)
                handle.fill(extent, Source(f).read)
                assert handle.read(extent.offset, extent.length) == content(
                    f, extent.offset, extent.length
                )
        except BaseException as error:
            failures.append(error)

    run_threads(3, work)
    assert failures == []
    assert handle.complete
    assert read_all(handle) == content(f)
    handle.release()


# -- room


def create_evicts_what_is_not_pinned(store: ChunkStore) -> None:
    kept = file(1, 6 << 20)
    pin = cached(store, kept)
    for n in range(40):
        cached(store, file(100 + n, 6 << 20)).release()
        assert store.usage().bytes <= SIZE
    assert store.usage().evicted_bytes > 0
    assert read_all(pin) == content(kept)
    pin.release()
    assert store.find(file(100, 6 << 20)) is None
    last = store.find(file(139, 6 << 20))
    assert last is not None
    last.release()


def when_all_is_pinned_there_is_no_space(store: ChunkStore) -> None:
    handles = [store.create(file(n, 3 << 20)) for n in range(SIZE // (3 << 20))]
    with pytest.raises(NoSpace):
        store.create(file(400, 3 << 20))
    assert store.usage().bytes <= SIZE
    handles.pop().release()
    cached(store, file(500, 3 << 20)).release()
    for handle in handles:
        handle.release()


def a_file_larger_than_the_store_is_cached_in_part(store: ChunkStore) -> None:
    f = file(7, SIZE + CHUNK_SIZE)
    handle = store.create(f)
    for at in range(0, SIZE, CHUNK_SIZE):
        handle.fill(Extent(at, CHUNK_SIZE), Source(f).read)
    with pytest.raises(NoSpace):
        handle.fill(Extent(SIZE, CHUNK_SIZE), Source(f).read)
    assert store.usage().bytes <= SIZE
    assert handle.read(0, 100) == content(f, 0, 100)
    handle.release()


def what_is_used_again_outlives_a_scan(store: ChunkStore) -> None:
    hot = [file(n, 1 << 20) for n in range(8)]
    for f in hot:
        cached(store, f).release()
    for n in range(200):
        cached(store, file(1000 + n, 1 << 20)).release()
        for f in hot:
            found = store.find(f)
            assert found is not None, f"after {n} scanned files"
            found.release()


def evict_by_inode_spares_pins(store: ChunkStore) -> None:
    one, two, three = file(1, 5000), file(2, 5000), file(3, 5000)
    handle = cached(store, one)
    for f in (two, three, file(2, 9000, b"v2")):
        cached(store, f).release()
    assert store.evict([Ino(1), Ino(2), Ino(99)]) > 0
    assert store.find(two) is None
    assert store.find(file(2, 9000, b"v2")) is None
    assert store.cached_bytes(three) == three.size
    assert read_all(handle) == content(one)
    handle.release()
    assert store.evict([]) > 0
    assert store.usage().files == 0
    assert store.usage().bytes == 0
    cached(store, one).release()
    assert store.cached_bytes(one) == one.size


def concurrent_creators_stay_within_the_bound(store: ChunkStore) -> None:
    failures: list[BaseException] = []
    over: list[int] = []

    def work(part: int) -> None:
        try:
            for n in range(30):
                f = file(part * 1000 + n % 17, 4 << 20)
                try:
                    handle = store.create(f)
                except NoSpace:
                    continue
                try:
                    if list(handle.missing(whole(f))):
                        handle.fill(whole(f), Source(f).read)
                    assert handle.read(1 << 20, 5000) == content(f, 1 << 20, 5000)
                except NoSpace:
                    pass
                finally:
                    handle.release()
                if store.usage().bytes > SIZE:
                    over.append(store.usage().bytes)
        except BaseException as error:
            failures.append(error)

    run_threads(4, work)
    assert failures == []
    assert over == []
    assert store.usage().pinned == 0


def two_creators_of_one_file_share_it(store: ChunkStore) -> None:
    failures: list[BaseException] = []

    def work(_: int) -> None:
        try:
            for n in range(50):
                f = file(n, 10_000)
                handle = store.create(f)
                handle.fill(whole(f), Source(f).read)
                assert read_all(handle) == content(f)
                handle.release()
        except BaseException as error:
            failures.append(error)

    run_threads(4, work)
    assert failures == []
    assert store.usage().files == 50


def run_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def cases() -> list[Case]:
    """All cases of this module: its public functions of a store alone."""
    found = inspect.getmembers(sys.modules[__name__], inspect.isfunction)
    return [
        function
        for _, function in found
        if function.__module__ == __name__
        and list(inspect.signature(function).parameters) == ["store"]
    ]


def case_id(case: Case) -> str:
    return case.__name__
