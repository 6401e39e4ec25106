"""NFS version 3 and MOUNT version 3 (RFC 1813): arguments and results as bytes and values.

Results are parsed from the status word on (`Reply.body`); a result that is not NFS3_OK gives its
status and nothing else. READ is special: bulk bytes never pass through the codec, `parse_read_head`
says where they begin and the caller receives them into its own buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from hsfs.core.errors import ProtocolError
from hsfs.proto.xdr import Packer, Unpacker, opaque

VERSION = 3
MOUNT_VERSION = 3
HANDLE_MAX = 64
COOKIE_VERIFIER = 8
NAME_LIMIT = 4096  # on the wire; RFC 1813 leaves it open
PATH_LIMIT = 65536
_LIST_LIMIT = 100_000

# Procedures of program 100003, version 3, and of MOUNT (100005, version 3).
NULL = 0
GETATTR = 1
LOOKUP = 3
READLINK = 5
READ = 6
READDIR = 16
READDIRPLUS = 17
FSSTAT = 18
FSINFO = 19
MOUNTPROC_MNT = 1
MOUNTPROC_EXPORT = 5


class Status(IntEnum):
    """nfsstat3."""

    OK = 0
    PERM = 1
    NOENT = 2
    IO = 5
    NXIO = 6
    ACCES = 13
    EXIST = 17
    XDEV = 18
    NODEV = 19
    NOTDIR = 20
    ISDIR = 21
    INVAL = 22
    FBIG = 27
    NOSPC = 28
    ROFS = 30
    MLINK = 31
    NAMETOOLONG = 63
    NOTEMPTY = 66
    DQUOT = 69
    STALE = 70
    REMOTE = 71
    BADHANDLE = 10001
    NOT_SYNC = 10002
    BAD_COOKIE = 10003
    NOTSUPP = 10004
    TOOSMALL = 10005
    SERVERFAULT = 10006
    BADTYPE = 10007
    JUKEBOX = 10008


class MountStatus(IntEnum):
    """mountstat3."""

    OK = 0
    PERM = 1
    NOENT = 2
    IO = 5
    ACCES = 13
    NOTDIR = 20
    INVAL = 22
    NAMETOOLONG = 63
    NOTSUPP = 10004
    SERVERFAULT = 10006


class FileKind(IntEnum):
    """ftype3."""

    REG = 1
    DIR = 2
    BLK = 3
    CHR = 4
    LNK = 5
    SOCK = 6
    FIFO = 7


class Attributes(NamedTuple):
    """fattr3. Times are nanoseconds; `mode` as sent (permission bits)."""

    kind: int
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    used: int
    rdev_major: int
    rdev_minor: int
    fsid: int
    fileid: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int


class Found(NamedTuple):
    """What LOOKUP gives; `attributes` may be missing."""

    handle: bytes
    attributes: Attributes | None


class DirectoryEntry(NamedTuple):
    """An entry of READDIR (no attributes, no handle) or READDIRPLUS (both optional)."""

    fileid: int
    name: bytes
    cookie: int
    attributes: Attributes | None = None
    handle: bytes = b""


class DirectoryPage(NamedTuple):
    """A page of READDIR or READDIRPLUS."""

    verifier: bytes
    entries: Sequence[DirectoryEntry]
    eof: bool


class FsStat(NamedTuple):
    """FSSTAT: sizes in bytes, numbers of files."""

    total: int
    free: int
    available: int
    files: int
    files_free: int
    files_available: int


class FsInfo(NamedTuple):
    """The part of FSINFO that a reader needs (bytes)."""

    read_max: int
    read_preferred: int
    directory_preferred: int
    file_max: int


class Mounted(NamedTuple):
    """MNT's answer: the root's handle and the authentication flavors that the server takes."""

    handle: bytes
    flavors: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReadHead:
    """The head of a READ reply: `data` is where `count` bytes begin in the record."""

    xid: int
    status: int
    attributes: Attributes | None
    count: int
    eof: bool
    data: int


_FATTR = struct.Struct(">IIIIIQQIIQQIIIIII")
FATTR_SIZE = _FATTR.size
_ENTRY_START = struct.Struct(">IQI")  # follows, fileid, length of the name
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
# The usual READ reply after its record mark: xid, REPLY, accepted, verifier NONE and empty,
# SUCCESS, NFS3_OK, attributes follow, fattr3, count, eof, length.
_READ_HEAD = struct.Struct(">IIIIIIIIIIIIIQQIIQQIIIIIIIII")
READ_HEAD_SIZE = _READ_HEAD.size
_READ_ARGUMENTS = struct.Struct(">QI")
_GIGA = 1_000_000_000


def _attributes(words: tuple[int, ...]) -> Attributes:
    (kind, mode, nlink, uid, gid, size, used, major, minor, fsid, fileid, *times) = words
    atime_s, atime_ns, mtime_s, mtime_ns, ctime_s, ctime_ns = times
    return Attributes(
        kind,
        mode,
        nlink,
        uid,
        gid,
        size,
        used,
        major,
        minor,
        fsid,
        fileid,
        atime_s * _GIGA + atime_ns,
        mtime_s * _GIGA + mtime_ns,
        ctime_s * _GIGA + ctime_ns,
    )


def pack_attributes(a: Attributes) -> bytes:
    """fattr3 (a server's side)."""
    times = [part for t in (a.atime_ns, a.mtime_ns, a.ctime_ns) for part in divmod(t, _GIGA)]
    return _FATTR.pack(*a[:11], *times)


# Arguments.


def handle_arguments(handle: bytes) -> bytes:
    """Arguments of GETATTR, READLINK, FSSTAT, FSINFO: one nfs_fh3."""
    return opaque(handle)


def lookup_arguments(directory: bytes, name: bytes) -> bytes:
    """diropargs3."""
    return opaque(directory) + opaque(name)


def read_arguments(handle: bytes, offset: int, count: int) -> bytes:
    """READ3args."""
    return opaque(handle) + _READ_ARGUMENTS.pack(offset, count)


def readdir_arguments(handle: bytes, cookie: int, verifier: bytes, count: int) -> bytes:
    """READDIR3args; `count` bounds the reply in bytes."""
    return bytes(Packer().opaque(handle).u64(cookie).fixed(verifier).u32(count).data)


def readdirplus_arguments(
    handle: bytes, cookie: int, verifier: bytes, directory_count: int, count: int
) -> bytes:
    """READDIRPLUS3args: `directory_count` bounds names and cookies, `count` the whole reply."""
    packer = Packer().opaque(handle).u64(cookie).fixed(verifier).u32(directory_count).u32(count)
    return bytes(packer.data)


# Results. Each takes the record and where the status word is.


def status_of(record: bytes | memoryview, position: int) -> int:
    """The status word; an unknown number stays a number."""
    return Unpacker(record, position).u32()


def _begin(record: bytes | memoryview, position: int) -> Unpacker:
    reader = Unpacker(record, position)
    status = reader.u32()
    if status != Status.OK:
        raise ProtocolError("NFS", f"results asked of a reply with status {status}")
    return reader


def _post_op(reader: Unpacker) -> Attributes | None:
    return _attributes(reader.unpack(_FATTR)) if reader.boolean() else None


def parse_getattr(record: bytes | memoryview, position: int) -> Attributes:
    """GETATTR3resok."""
    return _attributes(_begin(record, position).unpack(_FATTR))


def parse_lookup(record: bytes | memoryview, position: int) -> Found:
    """LOOKUP3resok, without the directory's attributes."""
    reader = _begin(record, position)
    handle = reader.opaque(HANDLE_MAX)
    return Found(handle, _post_op(reader))


def parse_readlink(record: bytes | memoryview, position: int) -> bytes:
    """The target of READLINK3resok."""
    reader = _begin(record, position)
    _post_op(reader)
    return reader.opaque(PATH_LIMIT)


def parse_fsstat(record: bytes | memoryview, position: int) -> FsStat:
    """FSSTAT3resok."""
    reader = _begin(record, position)
    _post_op(reader)
    return FsStat(*(reader.u64() for _ in range(6)))


def parse_fsinfo(record: bytes | memoryview, position: int) -> FsInfo:
    """FSINFO3resok."""
    reader = _begin(record, position)
    _post_op(reader)
    read_max, read_preferred, _, _, _, _, directory_preferred = (reader.u32() for _ in range(7))
    return FsInfo(read_max, read_preferred, directory_preferred, reader.u64())


def parse_readdir(record: bytes | memoryview, position: int) -> DirectoryPage:
    """READDIR3resok."""
    reader = _begin(record, position)
    _post_op(reader)
    verifier = reader.fixed(COOKIE_VERIFIER)
    entries = []
    while reader.boolean():
        fileid = reader.u64()
        name = reader.opaque(NAME_LIMIT)
        entries.append(DirectoryEntry(fileid, name, reader.u64()))
    return DirectoryPage(verifier, entries, reader.boolean())


def parse_readdirplus(record: bytes | memoryview, position: int) -> DirectoryPage:
    """READDIRPLUS3resok. This is the hot loop of every scan: one struct call per group of fields,
    bounds checked by struct itself."""
    reader = _begin(record, position)
    _post_op(reader)
    verifier = reader.fixed(COOKIE_VERIFIER)
    data, at = bytes(reader.data), reader.position
    entries: list[DirectoryEntry] = []
    append = entries.append
    word, fattr, hyper = _U32.unpack_from, _FATTR.unpack_from, _U64.unpack_from
    try:
        while True:
            (follows,) = word(data, at)
            if follows == 0:
                at += 4
                break
            follows, fileid, length = _ENTRY_START.unpack_from(data, at)
            if follows != 1 or length > NAME_LIMIT:
                raise ProtocolError("NFS", "an entry that is none")
            at += 16
            name = data[at : at + length]
            at += (length + 3) & ~3
            (cookie,) = hyper(data, at)
            (has_attributes,) = word(data, at + 8)
            at += 12
            attributes = None
            if has_attributes:
                attributes = _attributes(fattr(data, at))
                at += FATTR_SIZE
            (has_handle,) = word(data, at)
            at += 4
            handle = b""
            if has_handle:
                (length,) = word(data, at)
                if length > HANDLE_MAX:
                    raise ProtocolError("NFS", f"a handle of {length} bytes")
                handle = data[at + 4 : at + 4 + length]
                at += 4 + ((length + 3) & ~3)
            if has_attributes > 1 or has_handle > 1:
                raise ProtocolError("NFS", "a number where a boolean belongs")
            append(DirectoryEntry(fileid, name, cookie, attributes, handle))
        (eof,) = word(data, at)
    except struct.error as error:
        raise ProtocolError("NFS", "a page of a listing ends in the middle") from error
    if eof > 1:
        raise ProtocolError("NFS", "a number where a boolean belongs")
    return DirectoryPage(verifier, entries, eof == 1)


def parse_read_head(record: bytes | bytearray | memoryview) -> ReadHead | None:
    """The head of an accepted and successful RPC reply to READ; None = something else (the caller
    then takes the record apart with `rpc.parse_reply`), or more bytes are needed.

    The usual form is recognised by one struct call; others (no attributes, a status, a verifier)
    are walked through.
    """
    if len(record) >= READ_HEAD_SIZE:
        words = _READ_HEAD.unpack_from(record)
        if words[1:8] == (1, 0, 0, 0, 0, 0, 1):
            count, eof, length = words[25:]
            if count != length or eof > 1:
                raise ProtocolError("NFS", f"READ: count {count}, {length} bytes, eof {eof}")
            return ReadHead(words[0], 0, _attributes(words[8:25]), count, eof == 1, READ_HEAD_SIZE)
    reader = Unpacker(record)
    try:
        xid, kind, accepted, _ = reader.u32(), reader.u32(), reader.u32(), reader.u32()
        if kind != 1 or accepted != 0:
            return None
        reader.opaque(400)
        if reader.u32() != 0:
            return None
        status = reader.u32()
        if status != Status.OK:
            return ReadHead(xid, status, None, 0, False, reader.position)
        attributes = _post_op(reader)
        count, eof, length = reader.u32(), reader.boolean(), reader.u32()
    except ProtocolError:
        return None
    if count != length:
        raise ProtocolError("NFS", f"READ: count {count}, {length} bytes")
    return ReadHead(xid, status, attributes, count, eof, reader.position)


# MOUNT version 3.


def mount_arguments(path: bytes) -> bytes:
    """Arguments of MNT."""
    return opaque(path)


def parse_mount(record: bytes | memoryview, position: int) -> Mounted:
    """mountres3_ok; the status has to be OK."""
    reader = _begin(record, position)
    handle = reader.opaque(HANDLE_MAX)
    count = reader.u32()
    if count > 1000:
        raise ProtocolError("MOUNT", f"{count} flavors")
    return Mounted(handle, tuple(reader.u32() for _ in range(count)))


def parse_exports(record: bytes | memoryview, position: int) -> Sequence[bytes]:
    """Paths of EXPORT's list (who may mount them is left out)."""
    reader = Unpacker(record, position)
    paths: list[bytes] = []
    words = 0
    while reader.boolean():
        paths.append(reader.opaque(PATH_LIMIT))
        while reader.boolean():
            reader.opaque(NAME_LIMIT)
            words += 1
            if words > _LIST_LIMIT:
                raise ProtocolError("MOUNT", "an export list without end")
    return paths
