"""ONC RPC over TCP (RFC 5531): record marking, call and reply headers, AUTH_SYS.

Pure: `RecordReader` is fed bytes and gives whole records; calls are made as bytes and replies are
taken apart as values. Both roles are here, since the NFS client and the export share it. A caller
that reads bulk data past the codec (straight into its own buffer) parses the record mark with
`record_mark` and the header with `parse_reply`.

Anything that breaks the protocol raises ProtocolError; a well-formed refusal is a value
(`Reply.status`), because what it means is the caller's business.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from hsfs.core.errors import ProtocolError
from hsfs.proto.xdr import Packer, Unpacker, opaque

RPC_VERSION = 2
LAST_FRAGMENT = 0x80000000
# A record that a client of ours can get: a page of a listing, or one READ of a few MiB.
RECORD_MAX = 16 * 1024 * 1024

PROGRAM_PORTMAP = 100000
PROGRAM_NFS = 100003
PROGRAM_MOUNT = 100005

AUTH_NONE = 0
AUTH_SYS = 1
_CALL = 0
_REPLY = 1
_ACCEPTED = 0
_DENIED = 1
_AUTH_MAX = 400  # RFC 5531 section 8.2: opaque_auth bodies
_GIDS_MAX = 16
_FRAGMENTS_MAX = 65536

_CALL_HEADER = struct.Struct(">IIIIII")
_MARK = struct.Struct(">I")
_REPLY_START = struct.Struct(">III")


class ReplyStatus(IntEnum):
    """How a call was answered. Accepted: the RFC's accept_stat; denied: 16 and up."""

    SUCCESS = 0
    PROG_UNAVAIL = 1
    PROG_MISMATCH = 2
    PROC_UNAVAIL = 3
    GARBAGE_ARGS = 4
    SYSTEM_ERR = 5
    RPC_MISMATCH = 16
    AUTH_ERROR = 17


class AuthStatus(IntEnum):
    """Why credentials were refused (RFC 5531 section 9)."""

    OK = 0
    BADCRED = 1
    REJECTEDCRED = 2
    BADVERF = 3
    REJECTEDVERF = 4
    TOOWEAK = 5
    INVALIDRESP = 6
    FAILED = 7


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply's header. `body` is where the results begin in the buffer that was parsed.

    `low` and `high` are the versions that the server has (PROG_MISMATCH, RPC_MISMATCH), `auth` the
    auth_stat of AUTH_ERROR.
    """

    xid: int
    status: ReplyStatus
    body: int = 0
    low: int = 0
    high: int = 0
    auth: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A call's header, as a server sees it. `body` is where the arguments begin."""

    xid: int
    program: int
    version: int
    procedure: int
    flavor: int
    credentials: bytes
    body: int


def auth_none() -> bytes:
    """Empty credentials."""
    return struct.pack(">II", AUTH_NONE, 0)


def auth_sys(machine: bytes, uid: int, gid: int, gids: Sequence[int] = (), stamp: int = 0) -> bytes:
    """AUTH_SYS credentials, ready for `call`; the protocol carries at most 16 groups."""
    body = Packer().u32(stamp & 0xFFFFFFFF).opaque(machine[:255]).u32(uid).u32(gid)
    groups = list(gids)[:_GIDS_MAX]
    body.u32(len(groups))
    for group in groups:
        body.u32(group)
    return struct.pack(">I", AUTH_SYS) + opaque(bytes(body.data))


def parse_auth_sys(body: bytes) -> tuple[int, int, tuple[int, ...]]:
    """(uid, gid, gids) of AUTH_SYS credentials."""
    reader = Unpacker(body)
    reader.u32()
    reader.opaque(255)
    uid, gid, count = reader.u32(), reader.u32(), reader.u32()
    if count > _GIDS_MAX:
        raise ProtocolError("RPC", f"{count} groups in AUTH_SYS")
    return uid, gid, tuple(reader.u32() for _ in range(count))


def call(
    xid: int, program: int, version: int, procedure: int, credentials: bytes, arguments: bytes
) -> bytes:
    """One call as one record with its mark; verifier AUTH_NONE."""
    length = _CALL_HEADER.size + len(credentials) + 8 + len(arguments)
    return b"".join(
        (
            _MARK.pack(LAST_FRAGMENT | length),
            _CALL_HEADER.pack(xid, _CALL, RPC_VERSION, program, version, procedure),
            credentials,
            b"\0\0\0\0\0\0\0\0",
            arguments,
        )
    )


def reply(xid: int, results: bytes, status: ReplyStatus = ReplyStatus.SUCCESS) -> bytes:
    """An accepted reply as one record with its mark (a server's side)."""
    body = struct.pack(">IIIIII", xid, _REPLY, _ACCEPTED, AUTH_NONE, 0, status) + results
    return _MARK.pack(LAST_FRAGMENT | len(body)) + body


def record_mark(word: bytes | bytearray | memoryview) -> tuple[int, bool]:
    """(length of the fragment, whether it is the record's last) of a mark's four bytes."""
    (value,) = _MARK.unpack_from(word)
    return value & ~LAST_FRAGMENT, bool(value & LAST_FRAGMENT)


def parse_reply(record: bytes | bytearray | memoryview, position: int = 0) -> Reply:
    """The header of a reply that begins at `position`."""
    reader = Unpacker(record, position)
    xid, kind, accepted = reader.unpack(_REPLY_START)
    if kind != _REPLY:
        raise ProtocolError("RPC", f"message type {kind} where a reply belongs")
    if accepted == _ACCEPTED:
        reader.u32()
        reader.opaque(_AUTH_MAX)
        status = reader.u32()
        if status > ReplyStatus.SYSTEM_ERR:
            raise ProtocolError("RPC", f"accept_stat {status}")
        if status == ReplyStatus.PROG_MISMATCH:
            return Reply(xid, ReplyStatus.PROG_MISMATCH, low=reader.u32(), high=reader.u32())
        return Reply(xid, ReplyStatus(status), body=reader.position)
    if accepted != _DENIED:
        raise ProtocolError("RPC", f"reply_stat {accepted}")
    reason = reader.u32()
    if reason == 0:
        return Reply(xid, ReplyStatus.RPC_MISMATCH, low=reader.u32(), high=reader.u32())
    if reason == 1:
        return Reply(xid, ReplyStatus.AUTH_ERROR, auth=reader.u32())
    raise ProtocolError("RPC", f"reject_stat {reason}")


def parse_call(record: bytes | bytearray | memoryview) -> Call:
    """The header of a call (a server's side)."""
    reader = Unpacker(record)
    xid, kind, rpc, program, version, procedure = reader.unpack(_CALL_HEADER)
    if kind != _CALL or rpc != RPC_VERSION:
        raise ProtocolError("RPC", f"message type {kind}, RPC version {rpc}")
    flavor = reader.u32()
    credentials = reader.opaque(_AUTH_MAX)
    reader.u32()
    reader.opaque(_AUTH_MAX)
    return Call(xid, program, version, procedure, flavor, credentials, reader.position)


class RecordReader:
    """Takes a byte stream and gives whole records, joined from any number of fragments.

    Raises ProtocolError for a record over `limit` bytes; the stream is lost then.
    """

    __slots__ = ("_buffer", "_fragments", "_joined", "_limit")

    def __init__(self, limit: int = RECORD_MAX) -> None:
        self._buffer = bytearray()
        self._joined = bytearray()
        self._fragments = 0
        self._limit = limit

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Records that became whole with these bytes, in order."""
        buffer = self._buffer
        buffer += data
        records: list[bytes] = []
        position = 0
        while len(buffer) - position >= 4:
            length, last = record_mark(memoryview(buffer)[position : position + 4])
            if length + len(self._joined) > self._limit:
                raise ProtocolError("RPC", f"a record of more than {self._limit} bytes")
            if len(buffer) - position - 4 < length:
                break
            fragment = bytes(memoryview(buffer)[position + 4 : position + 4 + length])
            position += 4 + length
            if last and not self._joined:
                records.append(fragment)
                self._fragments = 0
                continue
            self._joined += fragment
            self._fragments += 1
            if self._fragments > _FRAGMENTS_MAX:
                raise ProtocolError("RPC", "a record of too many fragments")
            if last:
                records.append(bytes(self._joined))
                self._joined.clear()
                self._fragments = 0
        del buffer[:position]
        return records


def portmap_getport(program: int, version: int, protocol: int = 6) -> bytes:
    """Arguments of PMAPPROC_GETPORT (procedure 3, program version 2); protocol 6 = TCP."""
    return struct.pack(">IIII", program, version, protocol, 0)


def parse_port(results: bytes | memoryview, position: int = 0) -> int:
    """The port of a PMAPPROC_GETPORT answer; 0 = not registered."""
    port = Unpacker(results, position).u32()
    if port > 65535:
        raise ProtocolError("portmapper", f"port {port}")
    return port
