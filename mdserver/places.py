"""Native places: finding what a backend is known to have, and taking a place from an inode."""

from __future__ import annotations

import msgspec

from hsfs.core.names import plain, show
from hsfs.core.types import ROOT_INO, FileType
from hsfs.mdserver.draft import Draft
from hsfs.mdserver.freshness import sort_key
from hsfs.mdserver.schema import (
    FLAG_HIDDEN_IDENTITY,
    Binding,
    Inode,
    coverage_key,
    decode_candidates,
    decode_odd,
    dentry_prefix,
    former_key,
    identity_key,
    inode_key,
    odd_key,
    orphan_key,
)
from hsfs.mdserver.store import Snapshot
from hsfs.mdserver.volume import DeviceFacts

_DIRECTORY = int(FileType.DIRECTORY)


class Known(msgspec.Struct, frozen=True, gc=False):
    """A dentry that one backend is known to have."""

    parent: int
    name: bytes
    ino: int
    type: int
    segment: bytes


def find(
    draft: Snapshot, facts: DeviceFacts, directory: int, segment: bytes, kind: int
) -> Known | None:
    """What a backend is known to have under a segment (in a tree of any type)."""
    as_it_is = plain(segment) or show(
        segment, dialect=facts.dialect, at_root=directory == ROOT_INO
    ) == (segment,)
    if as_it_is:
        value = draft.get(dentry_prefix(directory) + segment)
        if value is not None:
            candidates = decode_candidates(value)
            for at in range(1, len(candidates), 3):
                if candidates[at] == facts.id and (
                    not facts.flat or (candidates[at + 2] == _DIRECTORY) == (kind == _DIRECTORY)
                ):
                    return Known(
                        directory, segment, candidates[at + 1], candidates[at + 2], segment
                    )
        if not facts.flat or kind == _DIRECTORY:
            return None  # only an object may stand elsewhere: beside its prefix
    value = draft.get(odd_key(facts.id, directory, sort_key(segment, kind, facts.flat)))
    if value is None:
        return None
    odd = decode_odd(value)
    return Known(odd.parent, odd.name, odd.ino, odd.type, odd.segment)


def unbind(
    draft: Draft,
    ino: int,
    record: Inode,
    device: int,
    directory: int,
    segment: bytes,
    now_ns: int,
) -> None:
    """Take one native place from an inode, and the inode away with its last one."""
    kept: list[Binding] = []
    lost: Binding | None = None
    for binding in record.bindings:
        if (
            lost is None
            and binding.device == device
            and binding.directory == directory
            and binding.segment == segment
        ):
            lost = binding
        else:
            kept.append(binding)
    if lost is None:
        return
    draft.note(ino)
    is_directory = record.type == _DIRECTORY
    if kept:
        identity = record.identity
        if is_directory and identity:
            key = identity_key(device, identity)
            if draft.get(key) == ino.to_bytes(8, "big"):
                draft.put(key, None)
                identity = b""  # it was this backend's
        record = msgspec.structs.replace(
            record, bindings=tuple(kept), identity=identity, change=record.change + 1
        )
        draft.put_inode(ino, record)
        if is_directory:  # what this backend had in a merged directory is hidden at once
            draft.put(coverage_key(ino, device), None)
            draft.put(orphan_key(0, ino, device), b"\1")
            draft.note(0)
        return
    if record.identity and not record.flags & FLAG_HIDDEN_IDENTITY:
        record = msgspec.structs.replace(record, bindings=(), change=record.change + 1)
        draft.put_inode(ino, record)
        if lost.handle:
            draft.put(former_key(ino), directory.to_bytes(8, "big") + lost.handle)
        draft.put(orphan_key(now_ns // 1_000_000_000, ino, device), b"\1")
    elif is_directory:
        draft.put_inode(ino, msgspec.structs.replace(record, bindings=()))
        draft.put(orphan_key(0, ino, device), b"\1")
    else:
        draft.put(inode_key(ino), None)
