"""The engine for tests: a sorted list of keys beside a dict; the whole contract, no durability."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from hsfs.core.errors import Conflict, Trimmed
from hsfs.mdserver.store import FLOOR_KEY, JOURNAL, SEQ_KEY, Changes, Record, Snapshot, Transaction
from hsfs.mdserver.store.tail import Tail, journal_key


class _View:
    def __init__(self, values: dict[bytes, bytes], keys: list[bytes]) -> None:
        self.values = values
        self.keys = keys

    def get(self, key: bytes) -> bytes | None:
        return self.values.get(key)

    def range(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        keys = self.keys
        for at in range(bisect_left(keys, low), len(keys)):
            key = keys[at]
            if key >= high:
                return
            yield key, self.values[key]


class MemoryStore:
    """A MetadataStore in a dict. Snapshots are copies made when something is written."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._state = _View({}, [])
        self._readers = 0
        self._tail = Tail()

    @property
    def seq(self) -> int:
        """Sequence number of the last committed journal record."""
        return int.from_bytes(self._state.values.get(SEQ_KEY, b""), "big")

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """A consistent view."""
        with self._lock:
            self._readers += 1
            view = self._state
        try:
            yield view
        finally:
            with self._lock:
                self._readers -= 1

    def transact(self, batch: Sequence[Transaction]) -> list[Changes | Exception]:
        """Run all in order; see MetadataStore."""
        outcomes: list[Changes | Exception] = []
        with self._lock:
            before = self.seq
            if self._readers:
                self._state = _View(dict(self._state.values), list(self._state.keys))
            for transaction in batch:
                try:
                    changes = transaction(self._state)
                except Exception as error:
                    outcomes.append(error)
                    continue
                self._write(changes.writes, changes.journal)
                outcomes.append(changes)
            moved = self.seq != before
        if moved:
            self._tail.moved()
        return outcomes

    def commit(
        self,
        reads: Mapping[bytes, bytes | None],
        writes: Mapping[bytes, bytes | None],
        journal: bytes = b"",
    ) -> int:
        """Conditional write; see MetadataStore."""

        def conditional(snapshot: Snapshot) -> Changes:
            for key, value in reads.items():
                if snapshot.get(key) != value:
                    raise Conflict("metadata", "another writer was first")
            return Changes(None, dict(writes), journal)

        outcome = self.transact([conditional])[0]
        if isinstance(outcome, Exception):
            raise outcome
        return self.seq

    def _write(self, writes: Mapping[bytes, bytes | None], journal: bytes) -> None:
        for key, value in writes.items():
            self._put(key, value)
        if journal:
            seq = self.seq + 1
            self._put(journal_key(seq), journal)
            self._put(SEQ_KEY, seq.to_bytes(8, "big"))

    def _put(self, key: bytes, value: bytes | None) -> None:
        values, keys = self._state.values, self._state.keys
        if value is None:
            if values.pop(key, None) is not None:
                del keys[bisect_left(keys, key)]
        else:
            if key not in values:
                insort(keys, key)
            values[key] = value

    def records(self, after: int, limit: int) -> Sequence[Record]:
        """Journal records behind `after`; see MetadataStore."""
        with self.snapshot() as view:
            return read_records(view, after, limit)

    def trim(self, upto: int) -> None:
        """Forget journal records up to `upto`."""
        with self.snapshot() as view:
            writes: dict[bytes, bytes | None] = {
                key: None for key, _ in view.range(JOURNAL, journal_key(upto + 1))
            }
        if writes:
            writes[FLOOR_KEY] = upto.to_bytes(8, "big")
            self.commit({}, writes)

    def watch(self, after: int) -> AsyncIterator[Sequence[Record]]:
        """Journal records behind `after` as they come."""
        return self._tail.watch(self.records, after)

    def close(self) -> None:
        """Nothing to release."""


def read_records(view: Snapshot, after: int, limit: int) -> list[Record]:
    """Journal records of a snapshot behind `after`. Raises Trimmed."""
    floor = int.from_bytes(view.get(FLOOR_KEY) or b"", "big")
    if after < floor:
        raise Trimmed("journal", f"records up to {floor} are gone, {after} was asked for")
    records: list[Record] = []
    for key, value in view.range(journal_key(after + 1), JOURNAL + b"\xff" * 9):
        records.append(Record(int.from_bytes(key[1:], "big"), value))
        if len(records) == limit:
            break
    return records
