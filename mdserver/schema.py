"""What the store holds: keys, records, and the number of their format.

One key space; the first byte is the kind, numbers are big-endian. Values are msgpack arrays that
begin with their version; fields are only ever appended, with defaults (golden bytes in tests).

    I ino                      Inode
    D parent name              candidates: [1, device, ino, type, device, ino, type, ...]
    N device directory segment Odd: dentries whose name is not their segment (escapes, pieces, a
                               file renamed away from its native place)
    F device identity          ino of a native file by (fsid, fileid): renames and hard links
    L directory device         Coverage: what of the directory has been listed, and when
    O time ino device          inodes without a native place, and what a backend had in a merged
                               directory, to be dropped; by age
    H ino                      a directory's former place, an orphan's last handle
    V device                   DeviceRecord
    P name                     small values of the server's own (scan cursors)
    J seq                      journal record (store/)
    M name                     schema, epoch, next ino, uuid; seq and floor of the journal (store/)

Left for later pieces: W whiteouts, A extended attributes, X extents and replicas, S sessions,
R replies of mutations, T tags.

The namespace tree and the native trees share their inodes. A directory is bound to one native
directory per backend that has it; below a bound directory the dentry `D directory name` of a
device *is* the native entry, unless `N` says otherwise. An inode keeps its bindings for life and
keys are derived through them, so that a native rename of a directory touches one inode.

Invariants: every D candidate's inode exists; every binding of a live inode has its D candidate; an
F entry's inode has that identity; numbers grow and are never given out twice.
"""

from __future__ import annotations

import msgspec
from xxhash import xxh3_128_digest

from hsfs.core.errors import Corrupt, Unsupported
from hsfs.core.types import FileType, Wire

SCHEMA = 1
SYNTHETIC = 0  # the device of directories that no backend has: parents of `at`, pieces of names
FIRST_INO = 16  # 1 is the root; the rest is left for files of hsfs's own

SCHEMA_KEY = b"M\0schema"
EPOCH_KEY = b"M\0epoch"
NEXT_INO_KEY = b"M\0ino"
UUID_KEY = b"M\0uuid"

FLAG_PIECE = 1  # a `%~+` directory
FLAG_WEAK = 2  # the version may still change unnoticed
FLAG_HIDDEN_IDENTITY = 4  # the identity also names another inode: not indexed

_SEGMENT_KEY_MAX = 400  # longer segments are cut in keys; their whole stands in the value


class Binding(Wire, frozen=True, array_like=True, gc=False):
    """A native place: `segment` in the native directory that `directory` (an inode) is bound to
    on `device`. `directory` 0 = the root of the backend."""

    device: int
    directory: int
    segment: bytes
    handle: bytes = b""


class Inode(Wire, frozen=True, array_like=True, gc=False):
    """Attributes and bindings. `mode`, `uid`, `gid` -1 = as the backend's options say.
    `as_of_ns`: when it was last asked for by itself, if later than its directory's listing."""

    v: int
    type: int
    size: int
    mtime_ns: int
    version: bytes
    change: int
    bindings: tuple[Binding, ...]
    ctime_ns: int = 0
    mode: int = -1
    uid: int = -1
    gid: int = -1
    nlink: int = 1
    identity: bytes = b""
    target: bytes = b""
    rdev: int = 0
    flags: int = 0
    as_of_ns: int = 0


class Odd(Wire, frozen=True, array_like=True, gc=False):
    """Where an entry stands whose name is not its segment."""

    v: int
    parent: int
    name: bytes
    ino: int
    type: int
    segment: bytes


class Span(Wire, frozen=True, array_like=True, gc=False):
    """The part (after, upto] of a listing, seen at `as_of_ns`; `upto` b"" = to the end."""

    after: bytes
    upto: bytes
    as_of_ns: int


class Coverage(Wire, frozen=True, array_like=True, gc=False):
    """What is known of one native directory. `as_of_ns`: of its last whole listing (0 = never);
    `entries`: how many it has, as far as known; `spans`: parts that are newer than that."""

    v: int
    as_of_ns: int = 0
    entries: int = 0
    spans: tuple[Span, ...] = ()


class DeviceRecord(Wire, frozen=True, array_like=True, gc=False):
    """A backend that was added: numbers never change, names never move to another number."""

    v: int
    name: str
    url: str
    at: str
    priority: int
    ino: int  # the directory at `at`


class Change(Wire, frozen=True, array_like=True, gc=False):
    """A journal record: what clients have to forget. `items`: ino, name, ino, name, ... with
    name b"" for the inode itself; ino 0 = everything."""

    v: int
    time_s: int
    items: tuple[int | bytes, ...]


encode = msgspec.msgpack.Encoder().encode
_inode = msgspec.msgpack.Decoder(Inode)
_candidates = msgspec.msgpack.Decoder(tuple[int, ...])
_odd = msgspec.msgpack.Decoder(Odd)
_coverage = msgspec.msgpack.Decoder(Coverage)
_device = msgspec.msgpack.Decoder(DeviceRecord)
_change = msgspec.msgpack.Decoder(Change)


def u64(number: int) -> bytes:
    """Eight bytes that sort as the number does."""
    return number.to_bytes(8, "big")


def inode_key(ino: int) -> bytes:
    """Key of an Inode."""
    return b"I" + ino.to_bytes(8, "big")


def dentry_prefix(parent: int) -> bytes:
    """What the keys of a directory's dentries begin with; the name follows."""
    return b"D" + parent.to_bytes(8, "big")


def odd_prefix(device: int, directory: int) -> bytes:
    """What the keys of a native directory's odd entries begin with; the sort key follows."""
    return b"N" + device.to_bytes(2, "big") + directory.to_bytes(8, "big")


def odd_key(device: int, directory: int, sort_key: bytes) -> bytes:
    """Key of an Odd. Keys hold at most 511 bytes: a long segment is cut and told apart by hash."""
    if len(sort_key) > _SEGMENT_KEY_MAX:
        sort_key = sort_key[:_SEGMENT_KEY_MAX] + xxh3_128_digest(sort_key)
    return odd_prefix(device, directory) + sort_key


def odd_bound(sort_key: bytes) -> bytes:
    """The part of a sort key that keys hold as it is: where a range of odd entries begins."""
    return sort_key[:_SEGMENT_KEY_MAX]


def identity_key(device: int, identity: bytes) -> bytes:
    """Key of a native file's inode number."""
    return b"F" + device.to_bytes(2, "big") + identity


def coverage_key(directory: int, device: int) -> bytes:
    """Key of a Coverage."""
    return b"L" + directory.to_bytes(8, "big") + device.to_bytes(2, "big")


def orphan_key(time_s: int, ino: int, device: int) -> bytes:
    """Key of an inode that lost its place on a device, to be dropped in the order of time."""
    return b"O" + time_s.to_bytes(4, "big") + ino.to_bytes(8, "big") + device.to_bytes(2, "big")


def read_orphan_key(key: bytes) -> tuple[int, int, int]:
    """(time in seconds, ino, device)."""
    return (
        int.from_bytes(key[1:5], "big"),
        int.from_bytes(key[5:13], "big"),
        int.from_bytes(key[13:15], "big"),
    )


def former_key(ino: int) -> bytes:
    """Key of: directory (u64), then the last handle of an orphan."""
    return b"H" + ino.to_bytes(8, "big")


def device_key(device: int) -> bytes:
    """Key of a DeviceRecord."""
    return b"V" + device.to_bytes(2, "big")


def own_key(name: bytes) -> bytes:
    """Key of a small value of the server's own."""
    return b"P" + name


def after_prefix(prefix: bytes) -> bytes:
    """The first key behind all that begin with `prefix` (none of ours ends in 0xFF bytes only)."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,))


def decode_inode(value: bytes) -> Inode:
    """Raises Corrupt."""
    try:
        return _inode.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt("inode record", str(error)) from error


def decode_candidates(value: bytes) -> tuple[int, ...]:
    """(1, device, ino, type, ...). Raises Corrupt."""
    try:
        return _candidates.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt("dentry record", str(error)) from error


def decode_odd(value: bytes) -> Odd:
    """Raises Corrupt."""
    try:
        return _odd.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt("dentry record", str(error)) from error


def decode_coverage(value: bytes) -> Coverage:
    """Raises Corrupt."""
    try:
        return _coverage.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt("listing record", str(error)) from error


def decode_device(value: bytes) -> DeviceRecord:
    """Raises Corrupt."""
    try:
        return _device.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt("backend record", str(error)) from error


def decode_change(value: bytes) -> Change:
    """Raises Corrupt."""
    try:
        return _change.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt("journal record", str(error)) from error


def check_schema(value: bytes | None) -> bool:
    """Whether the store is new. Raises Unsupported when a newer version wrote it, Corrupt."""
    if value is None:
        return True
    if len(value) != 4:
        raise Corrupt("metadata store", "its schema number is unreadable")
    number = int.from_bytes(value, "big")
    if number > SCHEMA:
        raise Unsupported(
            "metadata store",
            f"it has schema {number}, this version reads up to {SCHEMA}",
            "use the hsfs that wrote it, or a newer one",
        )
    return False


def schema_value() -> bytes:
    """What stands under SCHEMA_KEY."""
    return SCHEMA.to_bytes(4, "big")


def directory_inode(bindings: tuple[Binding, ...], mtime_ns: int, flags: int = 0) -> Inode:
    """A new directory that no source has described."""
    return Inode(
        1, int(FileType.DIRECTORY), 0, mtime_ns, b"", 1, bindings, mtime_ns, -1, -1, -1, 1,
        b"", b"", 0, flags,
    )  # fmt: skip
