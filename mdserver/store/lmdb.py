"""The embedded engine: LMDB, one unnamed database, synchronous commits.

Why like this (measured, power cuts replayed): without `sync` a power cut leaves a corrupt tree;
with it every acknowledged commit is there. A commit costs two flushes whatever its size, so that
throughput comes from merging transactions, not from the engine. Write transactions begin and end in
the one writer thread: committing from another thread leaves LMDB's mutex held for ever. The map is
sparse and huge from the start, since growing it under readers is where LMDB users get hurt.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import lmdb

from hsfs.core.errors import Busy, Conflict, Corrupt, HsfsError, NoSpace, Unavailable, from_os_error
from hsfs.mdserver.store import FLOOR_KEY, JOURNAL, SEQ_KEY, Changes, Record, Snapshot, Transaction
from hsfs.mdserver.store.memory import read_records
from hsfs.mdserver.store.tail import Tail, journal_key

MAP_SIZES = (1 << 40, 1 << 37, 1 << 34, 1 << 31)  # bytes; the first that the machine allows
_TRIM_STEP = 4096


class _View:
    """A snapshot over one LMDB transaction."""

    __slots__ = ("_txn", "get")

    def __init__(self, txn: lmdb.Transaction) -> None:
        self._txn = txn
        # Without buffers=True, which hsfs never uses, values are bytes.
        self.get = cast("Callable[[bytes], bytes | None]", txn.get)

    def range(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        with self._txn.cursor() as cursor:
            if not cursor.set_range(low):
                return
            for key, value in cast("Iterable[tuple[bytes, bytes]]", cursor):
                if key >= high:
                    return
                yield key, value


class _Snapshot:
    """A read transaction as a context manager; leaner than a generator, this is every lookup."""

    __slots__ = ("_env", "_txn")

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env

    def __enter__(self) -> Snapshot:
        self._txn = self._env.begin()
        return _View(self._txn)

    def __exit__(self, *_: object) -> None:
        self._txn.abort()


class LmdbStore:
    """A MetadataStore in one directory. Raises Busy (open in this process), Corrupt, NoSpace,
    Unavailable."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._env = _open(directory)
        self._tail = Tail()
        self._env.reader_check()  # slots of killed processes would keep old pages for ever
        with self._env.begin() as txn:
            self._seq = int.from_bytes(txn.get(SEQ_KEY) or b"", "big")

    @property
    def seq(self) -> int:
        """Sequence number of the last committed journal record."""
        return self._seq

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        """A consistent view."""
        return _Snapshot(self._env)

    def transact(self, batch: Sequence[Transaction]) -> list[Changes | Exception]:
        """Run all in order in one commit; see MetadataStore."""
        outcomes: list[Changes | Exception] = []
        before = seq = self._seq
        dirty = False
        with _errors(self._directory):
            txn = self._env.begin(write=True)
            try:
                view = _View(txn)
                for transaction in batch:
                    try:
                        changes = transaction(view)
                    except Exception as error:
                        outcomes.append(error)
                        continue
                    if changes.writes:
                        _write(txn, changes.writes)
                        dirty = True
                    if changes.journal:
                        seq += 1
                        txn.put(journal_key(seq), changes.journal)
                    outcomes.append(changes)
                if seq != before:
                    txn.put(SEQ_KEY, seq.to_bytes(8, "big"))
            except BaseException:
                txn.abort()
                raise
            if dirty or seq != before:
                txn.commit()
            else:
                txn.abort()
        self._seq = seq
        if seq != before:
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
        return self._seq

    def records(self, after: int, limit: int) -> Sequence[Record]:
        """Journal records behind `after`; see MetadataStore."""
        with self.snapshot() as view:
            return read_records(view, after, limit)

    def trim(self, upto: int) -> None:
        """Forget journal records up to `upto`, in steps that keep transactions small."""

        def step(snapshot: Snapshot) -> Changes:
            writes: dict[bytes, bytes | None] = {}
            last = b""
            for last, _ in snapshot.range(JOURNAL, journal_key(upto + 1)):
                writes[last] = None
                if len(writes) == _TRIM_STEP:
                    break
            more = len(writes) == _TRIM_STEP
            if writes:
                writes[FLOOR_KEY] = last[1:]
            return Changes(more, writes)

        while True:
            outcome = self.transact([step])[0]
            if isinstance(outcome, Exception):
                raise outcome
            if not outcome.result:
                return

    def watch(self, after: int) -> AsyncIterator[Sequence[Record]]:
        """Journal records behind `after` as they come."""
        return self._tail.watch(self.records, after)

    def size(self) -> int:
        """Bytes of the pages in use."""
        return (int(self._env.info()["last_pgno"]) + 1) * int(self._env.stat()["psize"])

    def close(self) -> None:
        """Close the files."""
        self._env.close()


def _open(directory: Path) -> lmdb.Environment:
    with _errors(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for map_size in MAP_SIZES:
        try:
            return lmdb.open(
                os.fspath(directory),
                map_size=map_size,
                max_readers=1024,
                readahead=False,
                mode=0o600,
            )
        except (lmdb.MemoryError, OSError, lmdb.Error) as error:
            if map_size != MAP_SIZES[-1] and _is_too_big(error):
                continue
            raise _converted(error, directory) from error
    raise AssertionError("unreachable: the last size returns or raises")


def _is_too_big(error: Exception) -> bool:
    if isinstance(error, lmdb.MemoryError):
        return True
    words = os.strerror(errno.EFBIG), os.strerror(errno.EINVAL), os.strerror(errno.ENOMEM)
    return any(word in str(error) for word in words)


def _write(txn: lmdb.Transaction, writes: Mapping[bytes, bytes | None]) -> None:
    puts: list[tuple[bytes, bytes]] = []
    for key, value in writes.items():
        if value is None:
            txn.delete(key)
        else:
            puts.append((key, value))
    if len(puts) > 2:
        puts.sort()
        with txn.cursor() as cursor:
            cursor.putmulti(puts)
    else:
        for key, value in puts:
            txn.put(key, value)


@contextlib.contextmanager
def _errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise _converted(error, directory) from error


def _converted(error: Exception, directory: Path) -> HsfsError:
    what = f"metadata store {directory}"
    text = str(error)
    if isinstance(error, OSError):
        return from_os_error(error, what)
    if isinstance(error, lmdb.MapFullError | lmdb.DiskError) or os.strerror(errno.ENOSPC) in text:
        return NoSpace(what, text, "make room on its file system")
    if isinstance(error, lmdb.LockError) or "already open" in text:
        return Busy(what, text)
    if isinstance(error, lmdb.InvalidError | lmdb.CorruptedError | lmdb.PanicError):
        return Corrupt(what, text, "restore it from a backup, or remove it to assimilate anew")
    return Unavailable(what, text)
