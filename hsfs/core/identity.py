"""When two descriptions of a native thing mean the same inode: pure.

File systems: (fsid, fileid), checked by the handle, which carries the generation of a reused
number. Handles may change by themselves (a server whose export was renumbered), so that a new
handle alone means nothing while the content is unchanged. Object stores: the key alone, which the
caller has compared already.
"""

from __future__ import annotations

from dataclasses import dataclass

from hsfs.core.types import FileType


@dataclass(frozen=True, slots=True)
class Sighting:
    """What identity is decided by. `identity` and `handle` are b"" where there are none."""

    type: FileType
    identity: bytes
    handle: bytes
    size: int
    mtime_ns: int


def same_inode(known: Sighting, seen: Sighting) -> bool:
    """Whether what is `seen` under the known name (or with the known identity) is still it."""
    if known.type != seen.type:
        return False
    if not known.identity or not seen.identity:
        return True  # the name is all there is
    if known.identity != seen.identity:
        return False
    return _same_handle(known, seen) or _unchanged(known, seen)


def same_after_absence(known: Sighting, seen: Sighting) -> bool:
    """The same question when the known thing had been seen absent from its last place: a number
    without a handle may have been given to something new, which then has other times."""
    if known.type != seen.type or not known.identity or known.identity != seen.identity:
        return False
    if known.handle and seen.handle and known.handle == seen.handle:
        return True
    return _unchanged(known, seen)


def _same_handle(known: Sighting, seen: Sighting) -> bool:
    return not known.handle or not seen.handle or known.handle == seen.handle


def _unchanged(known: Sighting, seen: Sighting) -> bool:
    same_time = known.mtime_ns == seen.mtime_ns
    return same_time and (known.type is FileType.DIRECTORY or known.size == seen.size)
