"""Merging what a source says into the tree: one native directory, or a part of it, at a time.

Pure: a snapshot and a page in, changes out. The page is the truth about its range at its time; what
was learnt later, by another listing or by asking for one thing, is left alone. An entry keeps its
inode as `core/identity` says; what is gone loses its native place, and its inode with the last one:

- a file or directory with an identity becomes an *orphan*: it is found again under its new name if
  it was renamed, and dropped after a while if it was not;
- all others are gone at once, what was below a directory a little later (`mdserver/reaper.py`).

New names of a known identity: a file gets one more native place (a hard link, or the new name of a
rename whose old name falls away when its directory is listed); a directory has one place per
backend and moves. A directory that seems to move back to where it came from is the same directory
mounted twice at the source: it then gets an inode for each place.

The loop over entries is the cost of assimilation: no read per entry that is new, one that is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from hsfs.core.identity import Sighting, same_after_absence, same_inode
from hsfs.core.names import BESIDE_END, LEAD, Form, plain, read, show
from hsfs.core.types import ROOT_INO, DirectoryPage, FileType, ObjectStat, Place
from hsfs.mdserver.draft import Draft
from hsfs.mdserver.freshness import covered, known_since, overlaps, overtaken, sort_key, within
from hsfs.mdserver.places import Known, find, unbind
from hsfs.mdserver.schema import (
    FLAG_HIDDEN_IDENTITY,
    FLAG_PIECE,
    FLAG_WEAK,
    SYNTHETIC,
    Binding,
    Coverage,
    Inode,
    Odd,
    Span,
    after_prefix,
    coverage_key,
    decode_candidates,
    decode_inode,
    decode_odd,
    dentry_prefix,
    directory_inode,
    encode,
    former_key,
    identity_key,
    inode_key,
    odd_bound,
    odd_key,
    odd_prefix,
    orphan_key,
)
from hsfs.mdserver.store import Changes, Snapshot
from hsfs.mdserver.tree import DEPTH_MAX, View, binding_of
from hsfs.mdserver.volume import DeviceFacts, Volume

_FILE = int(FileType.FILE)
_DIRECTORY = int(FileType.DIRECTORY)


def assimilate(snapshot: Snapshot, volume: Volume, page: DirectoryPage, now_ns: int) -> Changes:
    """The changes that a page of a listing makes; the result is the number of its entries, or -1
    when it speaks of something else by now (a directory that was replaced, a removed backend)."""
    facts = volume.get(page.device)
    if facts is None:
        return Changes(-1)
    draft = Draft(snapshot)
    directory = resolve(draft, volume, facts, page)
    if directory is None:
        return Changes(-1)
    Merge(draft, volume, facts, directory, page.as_of_ns).page(page)
    return draft.changes(len(page.entries), now_ns)


def assimilate_names(
    snapshot: Snapshot,
    volume: Volume,
    device: int,
    directory: int,
    seen: Sequence[ObjectStat],
    absent: Iterable[bytes],
    as_of_ns: int,
) -> Changes:
    """The changes that asking for single names makes: what was `seen` in the directory (an inode),
    and which sort keys were found `absent`."""
    facts = volume.get(device)
    draft = Draft(snapshot)
    if facts is not None:
        record = View(draft, volume).inode(directory)
        if record is not None and binding_of(record, device) is not None:
            Merge(draft, volume, facts, directory, as_of_ns).names(seen, absent)
    return draft.changes(None, as_of_ns)


def assimilate_root(
    snapshot: Snapshot, volume: Volume, device: int, stat: ObjectStat, now_ns: int
) -> Changes:
    """The attributes of a backend's root, for the directory that shows it."""
    draft = Draft(snapshot)
    facts = volume.get(device)
    record = None if facts is None else View(draft, volume).inode(facts.ino)
    if facts is not None and record is not None and stat.type is FileType.DIRECTORY:
        described = _described(stat, record.bindings, b"", record.change + 1, record.flags, 0)
        if described != msgspec.structs.replace(record, change=described.change):
            draft.put_inode(facts.ino, described)
            draft.note(facts.ino)
    return draft.changes(None, now_ns)


def resolve(draft: Draft, volume: Volume, facts: DeviceFacts, page: DirectoryPage) -> int | None:
    """The inode of the page's directory; directories on the way that are not known yet are made,
    since the page proves that they exist. None when another directory is there by now."""
    key = page.directory.key
    ino = int(facts.ino)
    if facts.flat:
        segments = key[:-1].split(b"/") if key else []
    else:
        segments = key.split(b"/") if key else []
    for segment in segments:
        found = find(draft, facts, ino, segment, _DIRECTORY)
        if found is None or found.type != _DIRECTORY:
            coverage = View(draft, volume).coverage(ino, facts.id)
            order = sort_key(segment, _DIRECTORY, facts.flat)
            if known_since(coverage, order) > page.as_of_ns:
                return None  # a later listing of its parent has no such directory
            merge = Merge(draft, volume, facts, ino, page.as_of_ns)
            stat = ObjectStat(segment, FileType.DIRECTORY, Place(segment))
            merge.names((stat,), ())
            found = find(draft, facts, ino, segment, _DIRECTORY)
            if found is None or found.type != _DIRECTORY:
                return None
        ino = found.ino
    if page.directory.handle and segments:
        value = draft.get(inode_key(ino))
        binding = None if value is None else binding_of(decode_inode(value), facts.id)
        if binding is not None and binding.handle and binding.handle != page.directory.handle:
            return None
    return ino


class Merge:
    """One directory of one backend being merged into a draft."""

    def __init__(
        self, draft: Draft, volume: Volume, facts: DeviceFacts, directory: int, as_of_ns: int
    ) -> None:
        self.draft = draft
        self.view = View(draft, volume)
        self.facts = facts
        self.device = int(facts.id)
        self.flat = facts.flat
        self.directory = directory
        self.prefix = dentry_prefix(directory)
        self.as_of_ns = as_of_ns
        self.own_as_of_ns = 0  # recorded in inodes that were asked for by themselves
        self.listed = True  # whether clients may have cached that a name does not exist
        self.delta = 0
        self.touched = False
        self._entries: Sequence[ObjectStat] = ()
        self._flips: list[bytes] = []  # prefixes that came or went, whose objects are renamed

    # Entry points

    def page(self, page: DirectoryPage) -> None:
        """Merge a page of a listing."""
        coverage = self.view.coverage(self.directory, self.device)
        after, upto = page.after, page.upto
        if not page.adds_only and overtaken(coverage, after, upto, page.as_of_ns):
            return
        self.listed = overlaps(coverage, after, upto)
        if page.names_only:
            keys = {sort_key(e.name, e.type, self.flat) for e in page.entries}
            for key, known in self._known_range(after, upto).items():
                if key not in keys:
                    self._vanish(known)
        elif page.adds_only:
            self._merge(page.entries, None, b"", b"")
        else:
            known_range = self._known_range(after, upto)
            self._merge(page.entries, known_range, after, upto)
            for known in known_range.values():  # those that no entry claimed
                self._vanish(known)
        self._settle()
        if not page.adds_only:
            span = Span(after, upto, page.as_of_ns)
            value = encode(covered(coverage, span, self.delta))
            self.draft.put(coverage_key(self.directory, self.device), value)
        elif self.delta:
            self._count()
        self._touch_directory()

    def names(self, seen: Sequence[ObjectStat], absent: Iterable[bytes]) -> None:
        """Merge answers about single names."""
        self.own_as_of_ns = self.as_of_ns
        for key in absent:
            kind = _DIRECTORY if self.flat and key.endswith(b"/") else _FILE
            segment = key[:-1] if kind == _DIRECTORY else key
            known = find(self.draft, self.facts, self.directory, segment, kind)
            if known is not None:
                self._vanish(known)
        self._merge(seen, None, b"", b"")
        self._settle()
        if self.delta:
            self._count()
        self._touch_directory()

    def _settle(self) -> None:
        """Rename the objects beside prefixes that came or went."""
        for segment in self._flips:
            known = find(self.draft, self.facts, self.directory, segment, _FILE)
            if known is not None and known.type != _DIRECTORY:
                self._rename(known, Form.BESIDE if self._has_prefix(segment) else Form.SEGMENT)

    def _count(self) -> None:
        coverage = self.view.coverage(self.directory, self.device) or Coverage(1)
        entries = max(0, coverage.entries + self.delta)
        value = encode(msgspec.structs.replace(coverage, entries=entries))
        self.draft.put(coverage_key(self.directory, self.device), value)

    def _touch_directory(self) -> None:
        if not self.touched:
            return
        record = self.view.inode(self.directory)
        if record is not None:
            mtime_ns = max(record.mtime_ns, self.as_of_ns) if record.mode < 0 else record.mtime_ns
            record = msgspec.structs.replace(record, change=record.change + 1, mtime_ns=mtime_ns)
            self.draft.put_inode(self.directory, record)
        self.draft.note(self.directory)

    # What is known

    def _known_range(self, after: bytes, upto: bytes) -> dict[bytes, Known]:
        """By sort key, what this backend is known to have in (after, upto]."""
        out: dict[bytes, Known] = {}
        skip = len(self.prefix)
        device, flat, directory = self.device, self.flat, self.directory
        low = self.prefix + after
        high = self.prefix + upto + b"\0" if upto else after_prefix(self.prefix)
        for key, value in self.draft.range(low, high):
            name = key[skip:]
            candidates = decode_candidates(value)
            for at in range(1, len(candidates), 3):
                if candidates[at] == device:
                    kind = candidates[at + 2]
                    order = name + b"/" if flat and kind == _DIRECTORY else name
                    if (
                        LEAD not in name
                        and within(order, after, upto)
                        and (not flat or name.isascii() or self._is_segment(name, kind))
                    ):
                        out[order] = Known(directory, name, candidates[at + 1], kind, name)
                    break
        if flat:
            # The prefix `a/` comes behind `a.txt`, its name before: look for those that are.
            for at in range(1, len(after)):
                if after[at] < 0x2F and within(after[:at] + b"/", after, upto):
                    found = find(self.draft, self.facts, directory, after[:at], _DIRECTORY)
                    if found is not None:
                        out[after[:at] + b"/"] = found
        low = odd_prefix(device, directory)
        high = low + odd_bound(upto) + b"\xff" * 17 if upto else after_prefix(low)
        for _, value in self.draft.range(low + odd_bound(after), high):
            odd = decode_odd(value)
            order = sort_key(odd.segment, odd.type, flat)
            if within(order, after, upto):
                out[order] = Known(odd.parent, odd.name, odd.ino, odd.type, odd.segment)
        return out

    def _is_segment(self, name: bytes, kind: int) -> bool:
        """Whether a name without escapes is its own segment: names that are not UTF-8 have
        another one in the key."""
        native = read((name,), dialect=self.facts.dialect)
        if native is None or native.segment == name:
            return True
        order = sort_key(native.segment, kind, self.flat)
        return self.draft.get(odd_key(self.device, self.directory, order)) is None

    # Entries

    def _merge(
        self,
        entries: Sequence[ObjectStat],
        known_range: dict[bytes, Known] | None,
        after: bytes,
        upto: bytes,
    ) -> None:
        """Merge entries; those found in `known_range` are taken out of it. Without a range what is
        known is looked up one by one."""
        flat = self.flat
        self._entries = entries
        prefixes = (
            {entry.name for entry in entries if entry.type == _DIRECTORY} if flat else frozenset()
        )
        for entry in entries:
            kind = int(entry.type)
            order = segment = entry.name
            form = Form.SEGMENT
            if flat:
                prefix = segment + b"/"
                if kind == _DIRECTORY:
                    order = prefix
                elif not segment:
                    if not entry.size:
                        continue  # the directory itself
                    form = Form.MARKER
                elif segment in prefixes:
                    form = Form.BESIDE
                elif (
                    known_range is None or (upto and prefix > upto) or (after and prefix <= after)
                ) and self._has_prefix(segment):
                    form = Form.BESIDE  # the page has no word on the prefix
            elif segment in (b"", b".", b"..") or b"/" in segment:
                continue  # no file system has such a name
            if known_range is not None:
                known = known_range.pop(order, None)
            else:
                known = find(self.draft, self.facts, self.directory, segment, kind)
            if known is None or not self._update(known, entry, form):
                self._add(entry, form)
                if flat and kind == _DIRECTORY:
                    self._flips.append(segment)

    def _has_prefix(self, segment: bytes) -> bool:
        return find(self.draft, self.facts, self.directory, segment, _DIRECTORY) is not None

    def _rename(self, known: Known, form: Form) -> None:
        names = self._shown(known.segment, form)
        if known.name == names[-1] and (len(names) > 1) == (known.parent != self.directory):
            return
        self._unplace(known)
        self._place(known.ino, known.type, known.segment, names)

    def _shown(self, segment: bytes, form: Form) -> tuple[bytes, ...]:
        return show(segment, form, dialect=self.facts.dialect, at_root=self.directory == ROOT_INO)

    def _update(self, known: Known, entry: ObjectStat, form: Form) -> bool:
        """Whether the entry is the known inode; then it is brought up to date."""
        record = self.view.inode(known.ino)
        if record is None:
            self._unplace(known)
            return False
        if record.as_of_ns > self.as_of_ns:
            return True  # asked for by itself after this listing began
        binding = self._binding(record, known.segment)
        if binding is None or not self._same(record, binding.handle, entry):
            self._vanish(known)
            return False
        if form is Form.BESIDE or known.name.endswith(BESIDE_END):
            self._rename(known, form)
        self._refresh(known.ino, record, binding, entry)
        return True

    def _same(self, record: Inode, handle: bytes, entry: ObjectStat) -> bool:
        if record.flags & FLAG_HIDDEN_IDENTITY or _shared(record):
            return record.type == entry.type
        kind = FileType(record.type)
        known = Sighting(kind, record.identity, handle, record.size, record.mtime_ns)
        return same_inode(known, _sighting(entry))

    def _binding(self, record: Inode, segment: bytes) -> Binding | None:
        for binding in record.bindings:
            if (
                binding.directory == self.directory
                and binding.device == self.device
                and binding.segment == segment
            ):
                return binding
        return None

    def _refresh(self, ino: int, old: Inode, binding: Binding, entry: ObjectStat) -> None:
        """Bring an inode up to date with what its source says."""
        handle = entry.place.handle
        if old.type == _DIRECTORY and (entry.mode < 0 or not self._describes(old)):
            # Another backend describes the directory, or none does.
            if handle and handle != binding.handle:
                self._set_handle(ino, old, binding, handle)
            return
        flags = old.flags & ~FLAG_WEAK if entry.strong else old.flags | FLAG_WEAK
        shared = _shared(old)
        if (
            old.size == entry.size
            and old.mtime_ns == entry.mtime_ns
            and old.version == entry.version
            and old.ctime_ns == entry.ctime_ns
            and old.mode == entry.mode
            and old.uid == entry.uid
            and old.gid == entry.gid
            and old.nlink == entry.nlink
            and old.target == entry.target
            and old.rdev == entry.rdev
            and (old.identity == entry.identity or not entry.identity or shared)
        ):
            if handle and handle != binding.handle:
                self._set_handle(ino, old, binding, handle)
            elif flags != old.flags:
                self.draft.put_inode(ino, msgspec.structs.replace(old, flags=flags))
            return
        bindings = old.bindings
        if handle and handle != binding.handle:
            bindings = _with_handle(bindings, binding, handle)
        identity = old.identity
        if entry.identity and not (identity or shared or flags & FLAG_HIDDEN_IDENTITY):
            identity = entry.identity
            self.draft.put(identity_key(self.device, identity), ino.to_bytes(8, "big"))
        self.draft.put_inode(
            ino, _described(entry, bindings, identity, old.change + 1, flags, self.own_as_of_ns)
        )
        self.draft.note(ino)

    def _describes(self, record: Inode) -> bool:
        """Whether this backend's word on a merged directory's attributes counts."""
        for binding in record.bindings:
            facts = self.view.volume.get(binding.device)
            if facts is not None and not facts.flat and facts.order < self.facts.order:
                return False
        return True

    def _set_handle(self, ino: int, old: Inode, binding: Binding, handle: bytes) -> None:
        bindings = _with_handle(old.bindings, binding, handle)
        self.draft.put_inode(ino, msgspec.structs.replace(old, bindings=bindings))

    def _add(self, entry: ObjectStat, form: Form) -> None:
        """Give a new entry its inode and its name."""
        draft = self.draft
        kind = int(entry.type)
        segment = entry.name
        names = (
            (segment,) if form is Form.SEGMENT and plain(segment) else self._shown(segment, form)
        )
        binding = Binding(self.device, self.directory, segment, entry.place.handle)
        self.delta += 1
        self.touched = True
        if kind == _DIRECTORY and self._join(binding, entry, names):
            return
        if entry.identity and self._adopt(binding, entry, names):
            return
        ino = draft.new_ino()
        flags = 0 if entry.strong else FLAG_WEAK
        if entry.identity:
            key = identity_key(self.device, entry.identity)
            if kind == _DIRECTORY and self._taken(key, ino):
                flags |= FLAG_HIDDEN_IDENTITY
            else:
                draft.writes[key] = ino.to_bytes(8, "big")
        draft.writes[b"I" + ino.to_bytes(8, "big")] = encode(
            _described(entry, (binding,), entry.identity, 1, flags, self.own_as_of_ns)
            if kind != _DIRECTORY or entry.mode >= 0
            else directory_inode((binding,), self.as_of_ns, flags)
        )
        self._place(ino, kind, segment, names)

    def _taken(self, key: bytes, ino: int) -> bool:
        """Whether another live directory has the identity, which it then keeps."""
        value = self.draft.get(key)
        if value is None:
            return False
        other = self.view.inode(int.from_bytes(value, "big"))
        return other is not None and other.type == _DIRECTORY and bool(other.bindings)

    def _join(self, binding: Binding, entry: ObjectStat, names: tuple[bytes, ...]) -> bool:
        """Merge a directory with the one that has its name already, whoever made that."""
        parent = self.directory if len(names) == 1 else self._piece(names[:-1])
        candidates = self.view.candidates(parent, names[-1])
        for at in range(1, len(candidates), 3):
            if candidates[at + 2] != _DIRECTORY:
                continue
            ino = candidates[at + 1]
            record = self.view.inode(ino)
            if record is None or binding_of(record, self.device) is not None:
                continue
            flags = record.flags
            bindings = (*record.bindings, binding)
            if entry.mode >= 0 and self._describes(record):
                record = _described(
                    entry, bindings, record.identity, record.change + 1, flags, record.as_of_ns
                )
            else:
                record = msgspec.structs.replace(
                    record, bindings=bindings, change=record.change + 1
                )
            self.draft.put_inode(ino, record)
            self.draft.note(ino)
            self._place(ino, _DIRECTORY, binding.segment, names)
            self._return_to(ino)
            return True
        return False

    def _return_to(self, ino: int) -> None:
        """The backend had the merged directory before, and what it had there is not dropped yet:
        that counts again until the directory is listed."""
        key = orphan_key(0, ino, self.device)
        if self.draft.get(key) is not None:
            self.draft.put(key, None)
            before = Merge(self.draft, self.view.volume, self.facts, ino, self.as_of_ns)
            before.delta = len(before._known_range(b"", b""))
            before._count()

    def _adopt(self, binding: Binding, entry: ObjectStat, names: tuple[bytes, ...]) -> bool:
        """Find an entry's inode by its identity: it was renamed, or has another name besides."""
        value = self.draft.get(identity_key(self.device, entry.identity))
        if value is None:
            return False
        ino = int.from_bytes(value, "big")
        old = self.view.inode(ino)
        if old is None:
            return False
        kind = FileType(old.type)
        handle = old.bindings[0].handle if old.bindings else b""
        if not old.bindings:
            handle = self._orphan_handle(ino)
        known = Sighting(kind, old.identity, handle, old.size, old.mtime_ns)
        seen = _sighting(entry)
        if not (same_inode(known, seen) if old.bindings else same_after_absence(known, seen)):
            return False
        bindings: tuple[Binding, ...] = (binding, *old.bindings)
        if old.type == _DIRECTORY and old.bindings:
            if not self._movable(ino, old):
                return False
            before = old.bindings[0]
            coverage = self.view.coverage(before.directory, self.device)
            if known_since(coverage, before.segment) > self.as_of_ns:
                self.delta -= 1  # it has moved since this listing began
                return True
            self._leave(ino, before)
            bindings = (binding,)
        elif not old.bindings:
            self.draft.put(former_key(ino), None)
        if old.as_of_ns > self.as_of_ns:  # asked for by itself since: only the place is news
            record = msgspec.structs.replace(old, bindings=bindings, change=old.change + 1)
        else:
            flags = old.flags & ~FLAG_WEAK if entry.strong else old.flags | FLAG_WEAK
            change = old.change + 1
            record = _described(entry, bindings, old.identity, change, flags, self.own_as_of_ns)
        self.draft.put_inode(ino, record)
        self.draft.note(ino)
        self._place(ino, int(entry.type), binding.segment, names)
        return True

    def _movable(self, ino: int, old: Inode) -> bool:
        """Whether a directory's single native place may become another one."""
        if len(old.bindings) != 1 or old.bindings[0].device != self.device:
            return False
        before = old.bindings[0]
        if before.directory == self.directory and any(
            entry.name == before.segment for entry in self._entries
        ):
            return False  # two names of one directory, side by side
        former = self.draft.get(former_key(ino))
        here = self.directory.to_bytes(8, "big")
        if former is not None and former[:8] == here:
            return False  # to and fro: the source shows one directory in two places
        at = self.directory
        for _ in range(DEPTH_MAX):
            if at == ino:
                return False  # below itself
            record = self.view.inode(at)
            found = None if record is None else self.view.location(record)
            if found is None:
                return True
            at = found[0]
        return False

    def _leave(self, ino: int, before: Binding) -> None:
        """Take a directory away from the name it had."""
        here = before.directory == self.directory
        other = (
            self
            if here
            else Merge(self.draft, self.view.volume, self.facts, before.directory, self.as_of_ns)
        )
        known = find(self.draft, self.facts, before.directory, before.segment, _DIRECTORY)
        if known is not None and known.ino == ino:
            other._unplace(known)
            other.delta -= 1
            if not here:
                other._count()
                other._touch_directory()
        if not here:
            self.draft.put(former_key(ino), before.directory.to_bytes(8, "big"))

    def _orphan_handle(self, ino: int) -> bytes:
        value = self.draft.get(former_key(ino))
        return b"" if value is None else value[8:]

    # Names

    def _place(self, ino: int, kind: int, segment: bytes, names: tuple[bytes, ...]) -> None:
        """Write the dentry."""
        draft = self.draft
        name = names[-1]
        parent = self.directory
        if len(names) == 1 and name == segment:
            key = self.prefix + name
        else:
            if len(names) > 1:
                parent = self._piece(names[:-1])
            key = dentry_prefix(parent) + name
            order = sort_key(segment, kind, self.flat)
            draft.put(
                odd_key(self.device, self.directory, order),
                encode(Odd(1, parent, name, ino, kind, segment)),
            )
        value = draft.get(key)
        if value is None:
            draft.writes[key] = encode((1, self.device, ino, kind))
        else:
            draft.writes[key] = encode((*decode_candidates(value), self.device, ino, kind))
        self.touched = True
        if parent != self.directory:
            draft.note(parent)
        if self.listed or value is not None:
            draft.note(parent, name)

    def _unplace(self, known: Known) -> None:
        """Take the dentry away."""
        draft = self.draft
        key = dentry_prefix(known.parent) + known.name
        value = draft.get(key)
        if value is not None:
            old = decode_candidates(value)
            kept: list[int] = [1]
            for at in range(1, len(old), 3):
                if old[at] != self.device or old[at + 1] != known.ino:
                    kept += old[at : at + 3]
            draft.put(key, encode(tuple(kept)) if len(kept) > 1 else None)
        if known.name != known.segment or known.parent != self.directory:
            order = sort_key(known.segment, known.type, self.flat)
            draft.put(odd_key(self.device, self.directory, order), None)
        draft.note(known.parent, known.name)
        self.touched = True
        if known.parent != self.directory:
            self._prune_piece(known.parent)

    def _piece(self, names: tuple[bytes, ...]) -> int:
        """The `%~+` directory behind these names, made when it is not there."""
        parent = self.directory
        for name in names:
            candidates = self.view.candidates(parent, name)
            if candidates:
                parent = candidates[2]
                continue
            ino = self.draft.new_ino()
            binding = Binding(SYNTHETIC, parent, name)
            self.draft.put_inode(ino, directory_inode((binding,), self.as_of_ns, FLAG_PIECE))
            self.draft.put(dentry_prefix(parent) + name, encode((1, SYNTHETIC, ino, _DIRECTORY)))
            self.draft.note(parent, name)
            parent = ino
        return parent

    def _prune_piece(self, ino: int) -> None:
        """Remove a `%~+` directory that has become empty, and those above it."""
        while ino != self.directory:
            prefix = dentry_prefix(ino)
            if next(iter(self.draft.range(prefix, after_prefix(prefix))), None) is not None:
                return
            record = self.view.inode(ino)
            if record is None or not record.flags & FLAG_PIECE:
                return
            binding = record.bindings[0]
            self.draft.put(inode_key(ino), None)
            self.draft.put(dentry_prefix(binding.directory) + binding.segment, None)
            self.draft.note(binding.directory, binding.segment)
            self.draft.note(ino)
            ino = binding.directory

    # Absence

    def _vanish(self, known: Known) -> None:
        """The source has it no longer under this name."""
        record = self.view.inode(known.ino)
        if record is not None:
            if record.as_of_ns > self.as_of_ns:
                return  # seen by itself after this listing began
            if self._binding(record, known.segment) is None:
                return  # has moved away in this very transaction
        self._unplace(known)
        self.delta -= 1
        if record is not None:
            unbind(
                self.draft, known.ino, record, self.device, self.directory,
                known.segment, self.as_of_ns,
            )  # fmt: skip
        if self.flat and known.type == _DIRECTORY:
            self._flips.append(known.segment)


def _shared(record: Inode) -> bool:
    """Whether a directory is merged from several backends: it then has no identity that counts."""
    return record.type == _DIRECTORY and len(record.bindings) > 1


def _sighting(entry: ObjectStat) -> Sighting:
    return Sighting(entry.type, entry.identity, entry.place.handle, entry.size, entry.mtime_ns)


def _described(
    entry: ObjectStat,
    bindings: tuple[Binding, ...],
    identity: bytes,
    change: int,
    flags: int,
    as_of_ns: int,
) -> Inode:
    return Inode(
        1,
        int(entry.type),
        entry.size,
        entry.mtime_ns,
        entry.version,
        change,
        bindings,
        entry.ctime_ns,
        entry.mode,
        entry.uid,
        entry.gid,
        entry.nlink,
        identity,
        entry.target,
        entry.rdev,
        flags,
        as_of_ns,
    )


def _with_handle(
    bindings: tuple[Binding, ...], binding: Binding, handle: bytes
) -> tuple[Binding, ...]:
    fresh = Binding(binding.device, binding.directory, binding.segment, handle)
    return tuple(fresh if one is binding else one for one in bindings)
