"""ONC RPC: byte tables fed whole, byte by byte and cut; garbage raises ProtocolError only."""

import contextlib
import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfs.core.errors import ProtocolError
from hsfs.proto import rpc
from hsfs.proto.rpc import AuthStatus, RecordReader, Reply, ReplyStatus


def words(*values):
    return struct.pack(f">{len(values)}I", *values)


REPLIES = [
    ("success", words(7, 1, 0, 0, 0, 0, 99), Reply(7, ReplyStatus.SUCCESS, body=24)),
    (
        "a verifier with a body",
        words(7, 1, 0, 2, 8, 1, 2, 0),
        Reply(7, ReplyStatus.SUCCESS, body=32),
    ),
    (
        "versions",
        words(8, 1, 0, 0, 0, 2, 4, 4),
        Reply(8, ReplyStatus.PROG_MISMATCH, low=4, high=4),
    ),
    ("no program", words(9, 1, 0, 0, 0, 1), Reply(9, ReplyStatus.PROG_UNAVAIL, body=24)),
    ("no procedure", words(9, 1, 0, 0, 0, 3), Reply(9, ReplyStatus.PROC_UNAVAIL, body=24)),
    ("system error", words(9, 1, 0, 0, 0, 5), Reply(9, ReplyStatus.SYSTEM_ERR, body=24)),
    (
        "credentials",
        words(10, 1, 1, 1, 5),
        Reply(10, ReplyStatus.AUTH_ERROR, auth=AuthStatus.TOOWEAK),
    ),
    ("rpc version", words(11, 1, 1, 0, 2, 3), Reply(11, ReplyStatus.RPC_MISMATCH, low=2, high=3)),
]


@pytest.mark.parametrize(("record", "reply"), [r[1:] for r in REPLIES], ids=[r[0] for r in REPLIES])
def test_replies(record, reply):
    assert rpc.parse_reply(record) == reply
    assert rpc.parse_reply(b"\xee" * 8 + record, 8).xid == reply.xid
    needed = reply.body or len(record)
    for end in range(needed):
        with pytest.raises(ProtocolError):
            rpc.parse_reply(record[:end])


@pytest.mark.parametrize(
    "record",
    [
        words(1, 0, 0, 0, 0, 0),  # a call
        words(1, 1, 2, 0, 0, 0),  # neither accepted nor denied
        words(1, 1, 0, 0, 0, 6),  # unknown accept_stat
        words(1, 1, 1, 2, 0, 0),  # unknown reject_stat
        words(1, 1, 0, 0, 404) + bytes(408),  # a verifier over the limit
    ],
)
def test_replies_that_are_none(record):
    with pytest.raises(ProtocolError):
        rpc.parse_reply(record)


def test_a_call_byte_for_byte():
    credentials = rpc.auth_sys(b"host", 1000, 100, [4, 5], stamp=9)
    record = rpc.call(5, rpc.PROGRAM_NFS, 3, 1, credentials, b"ARGS")
    body = (
        words(5, 0, 2, 100003, 3, 1)
        + words(1, 32, 9, 4)
        + b"host"
        + words(1000, 100, 2, 4, 5)
        + words(0, 0)
        + b"ARGS"
    )
    assert record == words(0x80000000 | len(body)) + body
    parsed = rpc.parse_call(record[4:])
    assert (parsed.xid, parsed.program, parsed.version, parsed.procedure) == (5, 100003, 3, 1)
    assert record[4:][parsed.body :] == b"ARGS"
    assert rpc.parse_auth_sys(parsed.credentials) == (1000, 100, (4, 5))


def test_auth_sys_keeps_to_the_protocol_s_limits():
    credentials = rpc.auth_sys(b"h" * 300, 1, 2, range(40))
    _, body_length = struct.unpack_from(">II", credentials)
    assert len(credentials) == 8 + body_length <= 408
    _, _, groups = rpc.parse_auth_sys(credentials[8:])
    assert groups == tuple(range(16))


def fragments(record, cuts):
    """A record as fragments that end at `cuts` and at its end."""
    edges = [0, *sorted(c for c in cuts if c <= len(record)), len(record)]
    pieces = [record[start:end] for start, end in itertools.pairwise(edges)]
    out = b""
    for i, piece in enumerate(pieces, start=1):
        out += words((0x80000000 if i == len(pieces) else 0) | len(piece)) + piece
    return out


@given(
    st.lists(
        st.tuples(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4)),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
def test_records_come_out_whole_however_the_stream_is_cut(records, data):
    stream = b"".join(fragments(record, cuts) for record, cuts in records)
    reader = RecordReader()
    got = []
    while stream:
        n = data.draw(st.integers(1, len(stream)))
        got += reader.feed(stream[:n])
        stream = stream[n:]
    assert got == [record for record, _ in records]


def test_records_byte_by_byte():
    stream = fragments(b"first record", [5]) + fragments(b"second", [])
    reader = RecordReader()
    got = [record for i in range(len(stream)) for record in reader.feed(stream[i : i + 1])]
    assert got == [b"first record", b"second"]


def test_a_record_without_end_is_refused():
    with pytest.raises(ProtocolError):
        RecordReader(limit=100).feed(words(0x80000000 | 101))
    reader = RecordReader(limit=100)
    reader.feed(words(60) + bytes(60))
    with pytest.raises(ProtocolError):
        reader.feed(words(60) + bytes(60))
    with pytest.raises(ProtocolError):
        RecordReader().feed(words(0) * 100_000)


def test_portmapper():
    assert rpc.portmap_getport(100003, 3) == words(100003, 3, 6, 0)
    assert rpc.parse_port(words(2049)) == 2049
    with pytest.raises(ProtocolError):
        rpc.parse_port(words(65536))


@given(st.binary(max_size=200))
def test_garbage_raises_protocol_errors_only(data):
    for parse in (rpc.parse_reply, rpc.parse_call, rpc.parse_auth_sys, rpc.parse_port):
        try:
            parse(data)
        except ProtocolError:
            continue
    with contextlib.suppress(ProtocolError):
        RecordReader(limit=1000).feed(data)
