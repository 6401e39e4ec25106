"""The engines of the metadata store against their one suite, and what only LMDB has."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading

import pytest

from hsfs.core.errors import AlreadyExists, Busy, Corrupt, Unavailable
from hsfs.mdserver.store import Changes
from hsfs.mdserver.store.committer import BATCH_MAX, Committer
from hsfs.mdserver.store.lmdb import LmdbStore
from hsfs.mdserver.store.memory import MemoryStore
from tests.conformance.metadata_store_suite import StoreSuite, everything, put


class TestMemory(StoreSuite):
    @pytest.fixture
    def store(self):
        return MemoryStore()


class TestLmdb(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path):
        store = LmdbStore(tmp_path / "store")
        yield store
        store.close()

    def test_reopened(self, tmp_path):
        store = LmdbStore(tmp_path / "s")
        store.commit({}, {b"k": b"v"}, b"record")
        store.close()
        store = LmdbStore(tmp_path / "s")
        assert everything(store) == {b"k": b"v"}
        assert store.seq == 1
        assert store.commit({}, {}, b"next") == 2
        store.close()

    def test_opened_twice(self, tmp_path):
        store = LmdbStore(tmp_path / "s")
        with pytest.raises(Busy):
            LmdbStore(tmp_path / "s")
        store.close()

    def test_garbage_is_named(self, tmp_path):
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / "data.mdb").write_bytes(os.urandom(16384))
        with pytest.raises(Corrupt):
            LmdbStore(tmp_path / "s")

    def test_a_place_that_is_no_directory(self, tmp_path):
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(AlreadyExists):
            LmdbStore(tmp_path / "file")


WRITER = """
import sys
from pathlib import Path
from hsfs.mdserver.store import Changes
from hsfs.mdserver.store.lmdb import LmdbStore
store = LmdbStore(Path(sys.argv[1]))
at = int(sys.argv[2])
while True:
    key = b"k%012d" % at
    def one(snapshot, key=key):
        return Changes(None, {key: key, b"last": key, b"p" + key: b"x" * 300}, b"r" + key)
    store.transact([one])
    at += 1
    sys.stdout.write("%d\\n" % at)
    sys.stdout.flush()
"""


def test_what_was_acknowledged_survives_kill_9(tmp_path):
    """A process that commits in a loop is killed at random points: every acknowledged commit is
    there, whole, and the journal has no gap."""
    acked = 0
    for patience in (1, 7, 20, 3):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "s"), str(acked)],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        for _ in range(patience):
            acked = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read().split(b"\n")
        acked = max([acked, *(int(line) for line in rest[:-1] if line)])
        child.wait()
        child.stdout.close()
        store = LmdbStore(tmp_path / "s")
        found = everything(store)
        last = int(found[b"last"][1:])
        assert last + 1 >= acked
        for at in range(last + 1):
            key = b"k%012d" % at
            assert found[key] == key
            assert len(found[b"p" + key]) == 300
        records = [r for start in range(0, store.seq, 1000) for r in store.records(start, 1000)]
        assert [r.seq for r in records] == list(range(1, store.seq + 1))
        assert [r.value for r in records] == [b"rk%012d" % at for at in range(last + 1)]
        store.close()
        acked = last + 1


@pytest.fixture(params=["memory", "lmdb"])
def any_store(request, tmp_path):
    store = MemoryStore() if request.param == "memory" else LmdbStore(tmp_path / "s")
    yield store
    store.close()


def test_committer_merges_what_waits(any_store):
    batches = []
    transact = any_store.transact
    any_store.transact = lambda batch: batches.append(len(batch)) or transact(batch)

    submitted = threading.Event()

    def first(snapshot):
        assert submitted.wait(60)
        return Changes()

    async def main():
        committer = Committer(any_store)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(committer.submit(first))
            await asyncio.sleep(0)
            jobs = [
                tasks.create_task(committer.submit(put({b"k%03d" % at: b""}, at, b"j")))
                for at in range(200)
            ]
            await asyncio.sleep(0)
            submitted.set()
        assert [job.result() for job in jobs] == list(range(200))
        await asyncio.to_thread(committer.close)
        with pytest.raises(Unavailable):
            await committer.submit(put({}))

    asyncio.run(asyncio.wait_for(main(), 60))
    assert sum(batches) == 201
    assert len(batches) <= 1 + math.ceil(200 / BATCH_MAX)
    assert len(everything(any_store)) == 200
    assert any_store.seq == 200


def test_committer_hands_back_errors_to_their_callers(any_store):
    def broken(snapshot):
        raise ValueError("mine")

    async def main():
        committer = Committer(any_store)
        outcomes = await asyncio.gather(
            committer.submit(put({b"a": b"1"}, "a")),
            committer.submit(broken),
            committer.submit(put({b"b": b"1"}, "b")),
            return_exceptions=True,
        )
        assert outcomes[0] == "a"
        assert outcomes[2] == "b"
        assert isinstance(outcomes[1], ValueError)
        cancelled = asyncio.ensure_future(committer.submit(put({b"c": b""})))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await committer.submit(lambda s: Changes(s.get(b"a"))) == b"1"
        await asyncio.to_thread(committer.close)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_committer_trims_the_journal(tmp_path):
    store = MemoryStore()

    async def main():
        committer = Committer(store, journal_keep=100)
        for _ in range(25):
            await asyncio.gather(*(committer.submit(put({}, None, b"j")) for _ in range(100)))
        await asyncio.to_thread(committer.close)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert store.seq == 2500
    with store.snapshot() as snapshot:
        assert len(list(snapshot.range(b"J", b"K"))) < 1000
