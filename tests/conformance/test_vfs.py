"""The Vfs over the metadata double and a memory backend, with Tier 0 in memory and on disk, with a
Tier 0 that is full, and with one that is lost."""

import math

import pytest
import trio

from hsfs.backends.memory import MemoryBackend
from hsfs.cache.memory import MemoryStore
from hsfs.cache.store import open_store
from hsfs.core.errors import CacheUnavailable, NoSpace
from hsfs.core.types import DeviceId
from hsfs.vfs.filesystem import Vfs
from tests.conformance.vfs_suite import SMALL, VfsSuite, fill
from tests.mount.mds_double import MdsDouble

DEVICE = DeviceId(1)


class Source:
    def __init__(self, backend, mds):
        self.write = backend.write
        self.remove = backend.remove
        self.backend = backend
        self.mds = mds

    async def tell(self):
        await self.mds.assimilate(push=True)


class FullStore(MemoryStore):
    def create(self, file):
        raise NoSpace("cache", "full")


class LostStore(MemoryStore):
    def find(self, file):
        raise CacheUnavailable("cache", "gone")

    def create(self, file):
        raise CacheUnavailable("cache", "gone")


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    if request.param == "memory":
        yield MemoryStore(1 << 30)
        return
    store = open_store(tmp_path / "cache", 1 << 30, fd_limit=64)
    yield store
    store.close()


@pytest.fixture
def backend():
    backend = MemoryBackend(DEVICE)
    fill(backend.write)
    return backend


@pytest.fixture
async def mds(backend):
    mds = MdsDouble(backend, ttl_s=math.inf)
    await mds.assimilate()
    return mds


@pytest.fixture
def source(backend, mds):
    return Source(backend, mds)


@pytest.fixture
def told():
    return []


@pytest.fixture
async def vfs(mds, store, backend, told, nursery):
    vfs = Vfs(mds=mds, store=store, backends={DEVICE: backend})
    scope = trio.CancelScope()

    async def run(task_status):
        with scope:
            await vfs.run(lambda ino, name: told.append((ino, name)), task_status=task_status)

    await nursery.start(run)
    yield vfs
    scope.cancel()


class TestVfs(VfsSuite):
    pass


class _Troubled:
    """Reading goes on around a Tier 0 in trouble."""

    async def test_reads(self, vfs, source):
        suite = VfsSuite()
        await suite.test_whole_files(vfs, source)
        await suite.test_ranges(vfs, source)
        await suite.test_many_readers_of_one_file(vfs, source)
        assert vfs.stats()["read_around"] > 0

    async def test_warming_says_so(self, vfs, source):
        with trio.fail_after(60):
            assert (await vfs.warm(b"big")).failed == 1
            assert (await vfs.warm(b"d")).failed == 1
            assert await VfsSuite().whole(vfs, b"d/small") == SMALL
            assert (await vfs.warm(b"d")).failed == 1


class TestFull(_Troubled):
    @pytest.fixture
    def store(self):
        return FullStore(1 << 20)


class TestLost(_Troubled):
    @pytest.fixture
    def store(self):
        return LostStore(1 << 20)
