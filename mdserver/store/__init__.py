"""The ordered key space under the metadata server: the Protocol that every engine keeps.

One key space, keys up to 511 bytes, values up to 64 KiB. A transaction is a pure function of a
snapshot: it may be run again, does no I/O and answers with its changes. Many of them are committed
together (`transact`), each seeing the changes of those before it; that is where group commit comes
from, whatever the engine. A read snapshot never lives across an await.

The journal is part of the key space: a transaction with a journal record takes the next sequence
number, in the same commit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

KEY_MAX = 511
VALUE_MAX = 64 * 1024
SEQ_KEY = b"M\0seq"
FLOOR_KEY = b"M\0floor"  # records up to it are gone
JOURNAL = b"J"


class Snapshot(Protocol):
    """One consistent state of the key space."""

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""

    def range(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys in [low, high) in byte order with their values; may be left early."""


@dataclass(slots=True)
class Changes:
    """What a transaction decided. `result` is handed to whoever submitted it; `journal` b"" =
    nothing that anybody has to be told."""

    result: object = None
    writes: dict[bytes, bytes | None] = field(default_factory=dict)
    journal: bytes = b""


Transaction = Callable[[Snapshot], Changes]


@dataclass(frozen=True, slots=True)
class Record:
    """One journal record as stored."""

    seq: int
    value: bytes


class MetadataStore(Protocol):
    """An engine. Blocking but for `watch`; any thread may take snapshots, one thread writes."""

    @property
    def seq(self) -> int:
        """Sequence number of the last committed journal record (0 = none yet)."""

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        """A consistent view, cheap; to be left before the next await."""

    def transact(self, batch: Sequence[Transaction]) -> list[Changes | Exception]:
        """Run all in order in one durable commit. A transaction that raises changes nothing and
        its exception stands in its place. Raises when the commit as a whole fails: NoSpace,
        Unavailable, UnknownResult."""

    def commit(
        self,
        reads: Mapping[bytes, bytes | None],
        writes: Mapping[bytes, bytes | None],
        journal: bytes = b"",
    ) -> int:
        """Write only if every key of `reads` still has that value; the seq afterwards. Raises
        Conflict."""

    def records(self, after: int, limit: int) -> Sequence[Record]:
        """Journal records behind `after`. Raises Trimmed when some of them are gone."""

    def trim(self, upto: int) -> None:
        """Forget journal records up to and including `upto`."""

    def watch(self, after: int) -> AsyncIterator[Sequence[Record]]:
        """Journal records behind `after` as they are committed (asyncio). Raises Trimmed."""

    def close(self) -> None:
        """Release the engine; snapshots must be gone."""
