"""What has to be asked before an answer counts: decisions on one snapshot, and their memory.

A name is as fresh as the listing of its directory at every backend merged there, or as the last
time it was asked for by itself; an inode as the listing that last saw it, or its own check. What
was confirmed by itself and had not changed is remembered here only: after a restart it is due.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hsfs.core.names import PIECE_LEAD, Form, read
from hsfs.core.types import ROOT_INO, Place
from hsfs.mdserver.freshness import WEAK_NS, known_since, relist_is_cheaper, sort_key
from hsfs.mdserver.schema import FLAG_WEAK, Binding, Coverage, Inode
from hsfs.mdserver.tree import View
from hsfs.mdserver.volume import DeviceFacts, Volume

CONFIRMED_MAX = 100_000  # things remembered as just asked for
FOR_EVER_NS = 1 << 62
_BY_HANDLE = 0  # in place of a device: the inode was asked for by handle, its name was not


@dataclass(frozen=True, slots=True)
class Due:
    """Something that one backend has to be asked, in one of its directories.

    `keys`: the sort keys that decide it; none = only the whole listing does. `places`: one per key
    where a stat can answer. `binding`: of the inode that is due, None when it is a name.
    `entries`: of the directory, None = never listed as a whole. `need_ns`: what was seen since
    then counts.
    """

    facts: DeviceFacts
    directory: int
    place: Place
    keys: tuple[bytes, ...]
    places: tuple[Place, ...]
    entries: int | None
    need_ns: int
    binding: Binding | None = None


@dataclass(slots=True)
class Answer:
    """What a look at the store gave: since when it is known, for how long that lasts, whether there
    is something to show, and what is due before it counts."""

    since_ns: int
    fresh_ns: int = FOR_EVER_NS
    known: bool = True
    due: list[Due] = field(default_factory=list)

    def bound(self, since_ns: int, fresh_ns: int) -> None:
        """The answer rests on this as well."""
        self.since_ns = min(self.since_ns, since_ns)
        self.fresh_ns = min(self.fresh_ns, fresh_ns)


class Judge:
    """Decides what is due; remembers what was asked for."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._confirmed: dict[tuple[int, int, bytes], int] = {}
        self._dues: dict[tuple[int, int], tuple[int, int]] = {}

    def name(
        self,
        view: View,
        answer: Answer,
        owner: int,
        record: Inode,
        names: tuple[bytes, ...],
        asked_ns: int,
    ) -> None:
        """Which backends have to be asked about a name in a directory (`names`: with the `%~+`
        pieces that lead to it)."""
        for binding in record.bindings:
            facts = self._volume.get(binding.device)
            if facts is not None:
                self._name_at(view, answer, facts, owner, record, names, asked_ns)

    def _name_at(
        self,
        view: View,
        answer: Answer,
        facts: DeviceFacts,
        owner: int,
        record: Inode,
        names: tuple[bytes, ...],
        asked_ns: int,
    ) -> None:
        keys: tuple[bytes, ...] = ()
        if not names[-1].startswith(PIECE_LEAD):
            native = read(names, dialect=facts.dialect, at_root=owner == ROOT_INO)
            if native is None:
                return  # this backend can't have such a name
            keys = (native.segment,)
            if facts.flat and native.form is not Form.MARKER:
                keys = (native.segment, native.segment + b"/")
        coverage = view.coverage(owner, facts.id)
        since_ns = _whole_ns(coverage)
        if keys:
            since_ns = min(
                max(known_since(coverage, key), self._confirmed.get((facts.id, owner, key), 0))
                for key in keys
            )
        answer.bound(since_ns, facts.freshness_ns)
        if since_ns and since_ns >= asked_ns - facts.freshness_ns:
            return
        place = view.directory_place(facts, owner, record)
        if place is None:
            return
        places: tuple[Place, ...] = ()
        if keys != (b"",):  # the marker of a prefix is told from the prefix by a listing only
            lead = _lead(facts, place.key)
            places = tuple(Place(lead + key) for key in keys)
        need_ns = max(1, asked_ns - facts.freshness_ns)
        answer.due.append(Due(facts, owner, place, keys, places, _entries(coverage), need_ns))

    def inode(
        self, view: View, answer: Answer, record: Inode, asked_ns: int, force: bool = False
    ) -> None:
        """Which backends have to be asked about an inode's attributes; with `force` all are."""
        seen: set[int] = set()
        for binding in record.bindings:
            facts = self._volume.get(binding.device)
            if facts is None or binding.device in seen or not binding.directory:
                continue
            parent_record = view.inode(binding.directory)
            if parent_record is None:
                continue
            parent = view.directory_place(facts, binding.directory, parent_record)
            if parent is None:
                continue
            seen.add(binding.device)
            key = sort_key(binding.segment, record.type, facts.flat)
            coverage = view.coverage(binding.directory, binding.device)
            since_ns = max(
                record.as_of_ns,
                known_since(coverage, key),
                self._confirmed.get((facts.id, binding.directory, key), 0),
                self._confirmed.get((_BY_HANDLE, binding.directory, key), 0),
            )
            fresh_ns = facts.freshness_ns
            if record.flags & FLAG_WEAK:
                fresh_ns = min(fresh_ns, WEAK_NS)
            answer.bound(since_ns, fresh_ns)
            if not force and since_ns and since_ns >= asked_ns - fresh_ns:
                continue
            places: tuple[Place, ...] = ()
            if key:  # see above
                places = (Place(_lead(facts, parent.key) + key, binding.handle),)
            entries, need_ns = _entries(coverage), max(1, asked_ns - fresh_ns)
            answer.due.append(
                Due(facts, binding.directory, parent, (key,), places, entries, need_ns, binding)
            )

    def root(self, ino: int, asked_ns: int) -> DeviceFacts | None:
        """The backend whose root has to be asked for a directory's attributes."""
        facts = self._volume.describer(ino)
        if facts is None:
            return None
        since_ns = self._confirmed.get((facts.id, 0, b""), 0)
        return None if since_ns and since_ns >= asked_ns - facts.freshness_ns else facts

    def confirm_root(self, facts: DeviceFacts, as_of_ns: int) -> None:
        """The backend's root was asked for."""
        self._confirmed[(facts.id, 0, b"")] = as_of_ns

    def confirm(self, due: Due, as_of_ns: int) -> None:
        """The source was asked about it by itself."""
        confirmed = self._confirmed
        if len(confirmed) >= CONFIRMED_MAX:
            for old in list(confirmed)[: CONFIRMED_MAX // 2]:
                del confirmed[old]
        by_name = due.binding is None or due.facts.flat or not due.binding.handle
        device = due.facts.id if by_name else _BY_HANDLE
        for key in due.keys:
            confirmed[(device, due.directory, key)] = as_of_ns

    def relist(self, due: Due, now_ns: int) -> bool:
        """Whether listing the whole directory is the cheaper way to know; counts what falls due."""
        if due.entries is None:
            return due.binding is None
        key = (int(due.facts.id), due.directory)
        began_ns, count = self._dues.get(key, (0, 0))
        if now_ns - began_ns > max(due.facts.freshness_ns, 1_000_000_000):
            began_ns, count = now_ns, 0
        if len(self._dues) >= CONFIRMED_MAX:
            self._dues.clear()
        self._dues[key] = began_ns, count + 1
        return relist_is_cheaper(due.entries, count + 1)


def _whole_ns(coverage: Coverage | None) -> int:
    return 0 if coverage is None else coverage.as_of_ns


def _entries(coverage: Coverage | None) -> int | None:
    return None if coverage is None or not coverage.as_of_ns else coverage.entries


def _lead(facts: DeviceFacts, key: bytes) -> bytes:
    """What stands before a segment of a directory of that key."""
    return key if facts.flat or not key else key + b"/"
