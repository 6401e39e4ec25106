"""Tier 0 under random use: never wrong bytes, never over its bound, whatever happens between.

Each step of the machine is a call of the store, a crash (everything in memory is lost, nothing is
flushed), a clean restart, or damage to cache files while no process has them.
"""

import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hsfs.cache import integrity
from hsfs.cache.directory import key_of, path_of
from hsfs.cache.store import open_store
from hsfs.core.blocks import align, clip
from hsfs.core.errors import Corrupt, NoSpace, Unavailable
from hsfs.core.types import BLOCK_SIZE, Extent
from tests.conformance.chunk_store_suite import Source, content, file, whole

SIZE = 3 << 20
SIZES = [0, 1, 5000, BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 12 * BLOCK_SIZE, SIZE + BLOCK_SIZE]
ALL = [file(ino, SIZES[(ino + n) % 7], b"v%d" % n) for ino in range(1, 6) for n in range(3)]
FILES = st.sampled_from(ALL)
FILE_OF = {path_of(key_of(f)).rpartition("/")[2]: f for f in ALL}
INDEX = st.integers(0, 1000)
DAMAGE = ["", "", "flip", "cut", "zeros", "replace", "remove", "swap", "index"]


def kill(store):
    """What kill -9 leaves: nothing is flushed, the kernel closes the files and drops the lock."""
    store._stop = True
    store._wake.set()
    store._thread.join()
    for state in [*store._files.values(), *store._doomed]:
        store.descriptors.drop(state)
    store._index.close()
    store._slot.close()
    store._closed = True


class StoreMachine(RuleBasedStateMachine):
    segment_blocks = 256

    def __init__(self):
        super().__init__()
        # Segments of a few blocks, so that small files have several.
        integrity.SEGMENT_BLOCKS = self.segment_blocks
        integrity.SEGMENT_SIZE = self.segment_blocks * integrity.HASH_SIZE
        self.directory = Path(tempfile.mkdtemp(prefix="hsfs-tier0-", dir="/var/tmp"))
        self.handles = []
        self.damaged = set()  # files whose cache files were tampered with
        self.grown = False  # damage that made more of a file than we wrote
        # Files made since the last flush: after a crash the log may hold the record of an evicted
        # predecessor, whose hashes then tell that the blocks are not there.
        self.made = set()
        self.suspect = set()
        self.start()

    def start(self):
        self.store = open_store(self.directory, SIZE, fd_limit=6, flush_s=60, probe_s=60)
        self.store.flush()  # waits for the adoption

    def teardown(self):
        integrity.SEGMENT_BLOCKS = 256
        integrity.SEGMENT_SIZE = 256 * integrity.HASH_SIZE
        try:
            for handle in self.handles:
                handle.release()
            assert self.store.usage().pinned == 0
            self.store.evict([])
            usage = self.store.usage()
            assert (usage.bytes, usage.files) == (0, 0)
            assert self.damaged or list(self.cache_files()) == []
        finally:
            self.store.close()
            shutil.rmtree(self.directory)

    def cache_files(self):
        return (p for p in (self.directory / "0" / "data").rglob("*") if p.is_file())

    def make(self, f):
        known = self.store.find(f)
        if known is None:
            self.made.add(f)
        else:
            known.release()
        return self.store.create(f)

    def may_be_wrong(self, f):
        return f in self.damaged or f in self.suspect

    def pick(self, n):
        return self.handles[n % len(self.handles)] if self.handles else None

    # -- use

    @rule(f=FILES)
    def create(self, f):
        try:
            handle = self.make(f)
        except NoSpace:
            assert self.handles or f.size > SIZE
            return
        assert handle.file == f
        self.handles.append(handle)

    @rule(f=FILES)
    def fetch(self, f):
        """What a whole read of a file through the mount comes to."""
        try:
            handle = self.make(f)
        except NoSpace:
            return
        try:
            for hole in list(handle.missing(whole(f))):
                handle.fill(hole, Source(f).read)
            self.check(handle)
        except NoSpace:
            pass
        finally:
            handle.release()

    def check(self, handle):
        """Each block is right, or known to be wrong; returns the bytes that are there."""
        f = handle.file
        right = 0
        for at in range(0, f.size, BLOCK_SIZE):
            hole = bool(handle.missing(Extent(at, 1)))
            try:
                data = handle.read(at, BLOCK_SIZE)
            except Corrupt:
                assert hole or self.may_be_wrong(f)
                assert handle.missing(Extent(at, 1))
            else:
                assert not hole
                assert data == content(f, at, BLOCK_SIZE)
                right += len(data)
        return right

    @rule()
    def check_everything(self):
        for f in ALL:
            handle = self.store.find(f)
            if handle is None:
                assert self.store.cached_bytes(f) == 0 or self.may_be_wrong(f)
                continue
            assert self.check(handle) == self.store.cached_bytes(f)
            assert bool(handle.missing(whole(f))) != handle.complete
            handle.release()

    @rule(f=FILES)
    def find(self, f):
        handle = self.store.find(f)
        cached = self.store.cached_bytes(f)
        if handle is None:
            return
        assert handle.file == f
        holes = sum(hole.length for hole in handle.missing(whole(f)))
        assert cached == f.size - holes
        self.handles.append(handle)

    @rule(n=INDEX, at=INDEX, blocks=st.integers(1, 13), fail=st.booleans())
    def fill(self, n, at, blocks, fail):
        handle = self.pick(n)
        if handle is None or not handle.file.size:
            return
        f = handle.file
        start = at * BLOCK_SIZE % f.size
        extent = align(Extent(start, blocks * BLOCK_SIZE), f.size)
        source = Source(f)
        source.fail_at = extent.offset + (1 << 20) if fail else None
        try:
            handle.fill(extent, source.read)
        except NoSpace:
            return
        except Unavailable:
            assert fail
            return
        assert list(handle.missing(extent)) == []

    @rule(n=INDEX, at=st.integers(0, SIZE), length=st.integers(1, 3 * BLOCK_SIZE))
    def read(self, n, at, length):
        handle = self.pick(n)
        if handle is None or not handle.file.size:
            return
        f = handle.file
        at %= f.size
        now = handle.read_cached(at, length)
        assert now is None or now == content(f, at, length)
        holes = list(handle.missing(clip(Extent(at, length), f.size)))
        try:
            data = handle.read(at, length)
        except Corrupt:
            assert holes or self.may_be_wrong(f)
            return
        assert not holes
        assert data == content(f, at, length)

    @rule(n=INDEX)
    def release(self, n):
        handle = self.pick(n)
        if handle is not None:
            self.handles.remove(handle)
            handle.release()

    @rule(inos=st.lists(st.integers(1, 5), max_size=2))
    def evict(self, inos):
        self.store.evict(inos)

    @rule()
    def flush(self):
        self.store.flush()
        self.made.clear()

    # -- restarts

    def damage(self, n, how):
        paths = sorted(self.cache_files())
        if not paths:
            return
        path = paths[n % len(paths)]
        size = path.stat().st_size
        self.damaged.add(FILE_OF[path.name])
        self.grown |= how in ("replace", "swap")
        if how == "flip" and size:
            with path.open("r+b") as f:
                at = n * 4099 % size
                f.seek(at)
                old = f.read(1)
                f.seek(at)
                f.write(bytes([old[0] ^ 255]))
        elif how == "cut":
            os.truncate(path, n * 4099 % (size + 1))
        elif how == "zeros":
            os.truncate(path, 0)
            os.truncate(path, size)
        elif how == "replace":
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data[::-1])
        elif how == "remove":
            path.unlink()
        elif how == "swap":
            other = paths[(n + 1) % len(paths)]
            if other != path:
                self.damaged.add(FILE_OF[other.name])
                aside = self.directory / "aside"
                path.rename(aside)
                other.rename(path)
                aside.rename(other)

    @rule(clean=st.booleans(), flush=st.booleans(), how=st.sampled_from(DAMAGE), n=INDEX)
    def restart(self, clean, flush, how, n):
        sound = [f for f in ALL if f not in self.damaged]
        kept = [self.store.cached_bytes(f) for f in sound]
        if flush:
            self.store.flush()
        if not flush and not clean:
            self.suspect |= self.made
        self.made.clear()
        if clean:
            for handle in self.handles:
                handle.release()
            self.store.close()
        else:
            kill(self.store)
        self.handles.clear()
        if how == "index":
            path = self.directory / "0" / "index"
            os.truncate(path, n * 37 % (path.stat().st_size + 1))
        elif how:
            self.damage(n, how)
        self.start()
        if not clean:
            known = self.store.usage().files
            assert len(list(self.cache_files())) == known
        if (clean or flush) and how != "index":
            for f, before in zip(sound, kept, strict=True):
                assert f in self.damaged or self.store.cached_bytes(f) == before
        if n % 2:
            self.check_everything()

    # -- always

    @invariant()
    def within_the_bound(self):
        usage = self.store.usage()
        assert 0 <= usage.bytes <= SIZE
        assert len(self.store.descriptors) <= 6
        assert usage.trouble == ""

    @invariant()
    @precondition(lambda self: not self.grown)
    def the_disk_agrees(self):
        used = sum(path.stat().st_blocks * 512 for path in self.cache_files())
        # A sparse file of many pieces needs a block or two for its map.
        assert used <= self.store.usage().bytes + 8192 * self.store.usage().files


class SegmentedMachine(StoreMachine):
    segment_blocks = 3


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=100, stateful_step_count=50)
TestSegmented = SegmentedMachine.TestCase
TestSegmented.settings = settings(max_examples=60, stateful_step_count=50)
