"""Dropping what lost its native place: orphans after a while, subtrees of vanished directories.

All of it is invisible already (no dentry leads to it). Each step is one small transaction, so that
a vanished tree of millions delays nobody.
"""

from __future__ import annotations

from hsfs.core.types import FileType
from hsfs.mdserver.draft import Draft
from hsfs.mdserver.places import unbind
from hsfs.mdserver.schema import (
    FLAG_HIDDEN_IDENTITY,
    SYNTHETIC,
    Inode,
    after_prefix,
    coverage_key,
    decode_candidates,
    decode_inode,
    decode_odd,
    dentry_prefix,
    encode,
    former_key,
    identity_key,
    inode_key,
    odd_prefix,
    orphan_key,
    read_orphan_key,
)
from hsfs.mdserver.store import Changes, Snapshot
from hsfs.mdserver.tree import binding_of

GRACE_S = 3600  # how long a renamed file may stay unseen under its new name and keep its inode
STEP = 1000  # children per transaction
_DIRECTORY = int(FileType.DIRECTORY)


def reap(snapshot: Snapshot, now_ns: int, grace_s: int = GRACE_S) -> Changes:
    """One step; the result says whether there is more to do now."""
    draft = Draft(snapshot)
    limit = max(1, now_ns // 1_000_000_000 - grace_s)
    budget = STEP
    more = False
    for key, _ in snapshot.range(b"O", b"O" + limit.to_bytes(4, "big")):
        if budget <= 0:
            more = True
            break
        budget -= 1
        time_s, ino, device = read_orphan_key(key)
        value = draft.get(inode_key(ino))
        record = None if value is None else decode_inode(value)
        if record is None or (record.bindings and (time_s or binding_of(record, device))):
            draft.put(key, None)  # found again, or gone already
            continue
        if record.type == _DIRECTORY:
            budget -= _drop_children(draft, ino, record, device, now_ns, budget)
            if budget <= 0:
                more = True
                break
        orphan = record.identity and not record.flags & FLAG_HIDDEN_IDENTITY
        # An orphan has an entry of its own, and so have the children of other backends.
        if not record.bindings and (time_s or not orphan) and _empty(draft, ino):
            _drop_inode(draft, ino, record, device)
        draft.put(key, None)
    # Directories below dropped ones have come in line.
    below = orphan_key(0, 0, 0)[:5]
    more = more or any(key.startswith(below) and value for key, value in draft.writes.items())
    return draft.changes(more, now_ns)


def _empty(draft: Draft, ino: int) -> bool:
    prefix = dentry_prefix(ino)
    return next(iter(draft.range(prefix, after_prefix(prefix))), None) is None


def _drop_inode(draft: Draft, ino: int, record: Inode, device: int) -> None:
    if record.identity:
        key = identity_key(device, record.identity)
        if draft.get(key) == ino.to_bytes(8, "big"):
            draft.put(key, None)
    if record.type == _DIRECTORY:
        prefix = coverage_key(ino, 0)[:-2]
        for key, _ in draft.range(prefix, after_prefix(prefix)):
            draft.put(key, None)
    draft.put(former_key(ino), None)
    draft.put(inode_key(ino), None)


def _drop_children(
    draft: Draft, ino: int, record: Inode, device: int, now_ns: int, budget: int
) -> int:
    """Take away what the device had in the directory; how many children that were (at least
    `budget` when there may be more)."""
    count = 0
    prefix = dentry_prefix(ino)
    for key, value in draft.range(prefix, after_prefix(prefix)):
        candidates = decode_candidates(value)
        if device not in candidates[1::3]:
            continue
        if count >= budget:
            return count
        count += 1
        _drop_dentry(draft, key, candidates, ino, key[len(prefix) :], device, now_ns)
    low = odd_prefix(device, ino)
    for key, value in draft.range(low, after_prefix(low)):
        if count >= budget:
            return count
        count += 1
        odd = decode_odd(value)
        draft.put(key, None)
        dentry = dentry_prefix(odd.parent) + odd.name
        found = draft.get(dentry)
        if found is not None:
            candidates = decode_candidates(found)
            _drop_dentry(draft, dentry, candidates, ino, odd.segment, device, now_ns)
        _drop_piece(draft, odd.parent, ino)
    return count


def _drop_dentry(
    draft: Draft,
    key: bytes,
    candidates: tuple[int, ...],
    directory: int,
    segment: bytes,
    device: int,
    now_ns: int,
) -> None:
    kept: list[int] = [1]
    for at in range(1, len(candidates), 3):
        if candidates[at] != device:
            kept += candidates[at : at + 3]
            continue
        child = candidates[at + 1]
        value = draft.get(inode_key(child))
        if value is not None:
            record = decode_inode(value)
            for binding in record.bindings:
                if binding.device == device and binding.directory == directory:
                    unbind(draft, child, record, device, directory, binding.segment, now_ns)
                    break
    draft.put(key, encode(tuple(kept)) if len(kept) > 1 else None)


def _drop_piece(draft: Draft, ino: int, owner: int) -> None:
    """Remove a `%~+` directory that has become empty."""
    while ino != owner:
        if not _empty(draft, ino):
            return
        value = draft.get(inode_key(ino))
        if value is None:
            return
        binding = decode_inode(value).bindings[0]
        if binding.device != SYNTHETIC:
            return
        draft.put(inode_key(ino), None)
        draft.put(dentry_prefix(binding.directory) + binding.segment, None)
        ino = binding.directory
