"""What every MetadataStore has to do; an engine's test module subclasses `StoreSuite`."""

import asyncio
import threading

import pytest

from hsfs.core.errors import Conflict, Trimmed
from hsfs.mdserver.store import Changes, MetadataStore


def put(writes, result=None, journal=b""):
    return lambda snapshot: Changes(result, writes, journal)


def everything(store):
    with store.snapshot() as snapshot:
        return {k: v for k, v in snapshot.range(b"", b"\xff") if k[:1] not in b"JM"}


class StoreSuite:
    """Subclasses provide the fixture `store`."""

    store: MetadataStore

    def test_ranges_are_ordered_and_half_open(self, store):
        keys = [b"a", b"a\0", b"aa", b"b", b"b\xff", b"c"]
        store.commit({}, {key: key * 2 for key in reversed(keys)})
        with store.snapshot() as snapshot:
            assert [k for k, _ in snapshot.range(b"a", b"c")] == keys[:-1]
            assert list(snapshot.range(b"a\0", b"b")) == [(b"a\0", b"a\0a\0"), (b"aa", b"aaaa")]
            assert list(snapshot.range(b"x", b"z")) == []
            first = next(iter(snapshot.range(b"b", b"z")))
            assert first == (b"b", b"bb")
            assert snapshot.get(b"aa") == b"aaaa"
            assert snapshot.get(b"ab") is None

    def test_a_snapshot_does_not_see_later_commits(self, store):
        store.commit({}, {b"k": b"1", b"l": b"1"})
        with store.snapshot() as snapshot:
            done = threading.Thread(target=store.commit, args=({}, {b"k": b"2", b"l": None}))
            done.start()
            done.join()
            assert snapshot.get(b"k") == b"1"
            assert [k for k, _ in snapshot.range(b"k", b"m")] == [b"k", b"l"]
        assert everything(store) == {b"k": b"2"}

    def test_commit_is_conditional(self, store):
        store.commit({b"k": None}, {b"k": b"1"})
        with pytest.raises(Conflict):
            store.commit({b"k": None}, {b"k": b"2"})
        with pytest.raises(Conflict):
            store.commit({b"k": b"1", b"other": b"x"}, {b"k": b"2"})
        store.commit({b"k": b"1", b"other": None}, {b"k": b"2", b"n": b"3"})
        assert everything(store) == {b"k": b"2", b"n": b"3"}

    def test_transactions_of_a_batch_see_each_other_and_fail_alone(self, store):
        def second(snapshot):
            assert snapshot.get(b"k") == b"1"
            assert list(snapshot.range(b"k", b"l")) == [(b"k", b"1")]
            return Changes("two", {b"k": None, b"m": b"2"})

        def broken(snapshot):
            raise ValueError("mine")

        outcomes = store.transact([put({b"k": b"1"}, "one"), second, broken, put({b"z": b""})])
        assert [getattr(one, "result", None) for one in outcomes] == ["one", "two", None, None]
        assert isinstance(outcomes[2], ValueError)
        assert everything(store) == {b"m": b"2", b"z": b""}

    def test_large_batches(self, store):
        writes = {b"k%06d" % at: b"v" * (at % 100) for at in range(5000)}
        store.transact([put(writes)])
        assert everything(store) == writes
        store.transact([put(dict.fromkeys(writes))])
        assert everything(store) == {}

    def test_the_journal_is_numbered_without_gaps(self, store):
        assert store.seq == 0
        store.transact(
            [put({b"a": b""}, journal=b"one"), put({b"b": b""}), put({}, journal=b"two")]
        )
        assert store.commit({}, {}, b"three") == 3
        assert [(r.seq, r.value) for r in store.records(0, 10)] == [
            (1, b"one"),
            (2, b"two"),
            (3, b"three"),
        ]
        assert [r.seq for r in store.records(1, 1)] == [2]
        assert list(store.records(3, 10)) == []
        assert store.seq == 3

    def test_trimmed_records_are_missed_loudly(self, store):
        for at in range(10):
            store.commit({}, {}, b"%d" % at)
        store.trim(4)
        assert [r.seq for r in store.records(4, 10)] == [5, 6, 7, 8, 9, 10]
        with pytest.raises(Trimmed):
            store.records(3, 10)
        store.trim(10)
        assert list(store.records(10, 10)) == []
        assert store.commit({}, {}, b"next") == 11

    def test_watchers_get_every_record_once(self, store):
        async def main():
            seen = []

            async def watch():
                async for records in store.watch(0):
                    seen.extend(r.seq for r in records)
                    if seen[-1] == 200:
                        return

            store.commit({}, {}, b"before")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(watch())
                tasks.create_task(watch())
                for at in range(199):
                    if at % 50 == 0:
                        await asyncio.sleep(0)
                    await asyncio.to_thread(store.commit, {}, {}, b"%d" % at)
            assert sorted(seen) == sorted(2 * list(range(1, 201)))

        asyncio.run(asyncio.wait_for(main(), 60))

    def test_watching_behind_the_floor_raises(self, store):
        async def main():
            for _ in range(3):
                store.commit({}, {}, b"x")
            store.trim(2)
            watching = store.watch(1)
            with pytest.raises(Trimmed):
                await anext(watching)

        asyncio.run(asyncio.wait_for(main(), 60))
