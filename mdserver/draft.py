"""A snapshot with the writes of one transaction laid over it, and what it has to announce."""

from __future__ import annotations

from collections.abc import Iterator

from hsfs.mdserver.schema import FIRST_INO, NEXT_INO_KEY, Change, Inode, encode, inode_key
from hsfs.mdserver.store import Changes, Snapshot


class Draft:
    """Reads like a Snapshot, sees its own writes, ends as Changes."""

    __slots__ = ("_first", "_next", "_noted", "_snapshot", "notes", "writes")

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.writes: dict[bytes, bytes | None] = {}
        self.notes: list[int | bytes] = []
        self._noted: set[tuple[int, bytes]] = set()
        self._first = self._next = 0

    def get(self, key: bytes) -> bytes | None:
        """The value as this transaction has it."""
        writes = self.writes
        if key in writes:
            return writes[key]
        return self._snapshot.get(key)

    def range(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys in [low, high) as this transaction has them, as of the call."""
        ours = {key: value for key, value in self.writes.items() if low <= key < high}
        if not ours:
            return self._snapshot.range(low, high)
        merged = dict(self._snapshot.range(low, high))
        for key, value in ours.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = value
        return iter(sorted(merged.items()))

    def put(self, key: bytes, value: bytes | None) -> None:
        """Write, or delete by None."""
        self.writes[key] = value

    def put_inode(self, ino: int, record: Inode) -> None:
        """Write an inode."""
        self.writes[inode_key(ino)] = encode(record)

    def new_ino(self) -> int:
        """A number that was never given out."""
        if not self._next:
            value = self._snapshot.get(NEXT_INO_KEY)
            self._first = self._next = int.from_bytes(value, "big") if value else FIRST_INO
        ino = self._next
        self._next = ino + 1
        return ino

    def note(self, ino: int, name: bytes = b"") -> None:
        """Clients have to forget the inode, or the dentry `name` in it; ino 0 = everything."""
        item = (ino, name)
        if item not in self._noted:
            self._noted.add(item)
            self.notes += item

    def changes(self, result: object, now_ns: int) -> Changes:
        """What the transaction decided."""
        if self._next != self._first:
            self.writes[NEXT_INO_KEY] = self._next.to_bytes(8, "big")
        journal = b""
        if self.notes:
            journal = encode(Change(1, now_ns // 1_000_000_000, tuple(self.notes)))
        return Changes(result, self.writes, journal)
