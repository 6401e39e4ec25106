"""NFSv3 results: golden bytes, every truncation, and garbage that raises ProtocolError only."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfs.core.errors import ProtocolError
from hsfs.proto import nfs3
from hsfs.proto.nfs3 import Attributes, DirectoryEntry
from hsfs.proto.xdr import Packer, opaque

ATTRIBUTES = Attributes(
    kind=1,
    mode=0o644,
    nlink=2,
    uid=1000,
    gid=100,
    size=5_000_000_000,
    used=4096,
    rdev_major=0,
    rdev_minor=0,
    fsid=0x1122334455667788,
    fileid=2**63 + 5,
    atime_ns=1_700_000_000_000_000_001,
    mtime_ns=1_700_000_001_999_999_999,
    ctime_ns=4_000_000_000_000_000_007,
)
FATTR = (
    struct.pack(">5I", 1, 0o644, 2, 1000, 100)
    + struct.pack(">QQ", 5_000_000_000, 4096)
    + struct.pack(">II", 0, 0)
    + struct.pack(">QQ", 0x1122334455667788, 2**63 + 5)
    + struct.pack(">6I", 1_700_000_000, 1, 1_700_000_001, 999_999_999, 4_000_000_000, 7)
)
OK = b"\0\0\0\0"
YES = b"\0\0\0\1"
NO = b"\0\0\0\0"


def words(*values):
    return struct.pack(f">{len(values)}I", *values)


def entry(fileid, name, cookie, attributes, handle):
    packed = YES + struct.pack(">Q", fileid) + opaque(name) + struct.pack(">Q", cookie)
    packed += YES + FATTR if attributes else NO
    return packed + (YES + opaque(handle) if handle else NO)


PAGE = (
    OK
    + YES
    + FATTR
    + b"VERIFIER"
    + entry(5, b".", 1, True, b"h" * 24)
    + entry(6, b"odd\xff name", 2, True, b"h" * 7)
    + entry(7, b"bare", 3, False, b"")
    + NO
    + YES
)
PLAIN_PAGE = (
    OK
    + NO
    + b"VERIFIER"
    + (YES + struct.pack(">Q", 6) + opaque(b"x") + struct.pack(">Q", 9))
    + NO
    + NO
)

RESULTS = [
    ("getattr", nfs3.parse_getattr, OK + FATTR, ATTRIBUTES),
    (
        "lookup",
        nfs3.parse_lookup,
        OK + opaque(b"handle") + YES + FATTR + NO,
        nfs3.Found(b"handle", ATTRIBUTES),
    ),
    (
        "lookup without attributes",
        nfs3.parse_lookup,
        OK + opaque(b"h") + NO + NO,
        nfs3.Found(b"h", None),
    ),
    ("readlink", nfs3.parse_readlink, OK + NO + opaque(b"../x\xff"), b"../x\xff"),
    (
        "fsstat",
        nfs3.parse_fsstat,
        OK + NO + struct.pack(">6QI", 1, 2, 3, 4, 5, 6, 0),
        nfs3.FsStat(1, 2, 3, 4, 5, 6),
    ),
    (
        "fsinfo",
        nfs3.parse_fsinfo,
        OK + NO + words(11, 12, 13, 14, 15, 16, 17) + struct.pack(">QIII", 18, 0, 1, 27),
        nfs3.FsInfo(11, 12, 17, 18),
    ),
    (
        "readdirplus",
        nfs3.parse_readdirplus,
        PAGE,
        nfs3.DirectoryPage(
            b"VERIFIER",
            [
                DirectoryEntry(5, b".", 1, ATTRIBUTES, b"h" * 24),
                DirectoryEntry(6, b"odd\xff name", 2, ATTRIBUTES, b"h" * 7),
                DirectoryEntry(7, b"bare", 3),
            ],
            True,
        ),
    ),
    (
        "readdir",
        nfs3.parse_readdir,
        PLAIN_PAGE,
        nfs3.DirectoryPage(b"VERIFIER", [DirectoryEntry(6, b"x", 9)], False),
    ),
    (
        "mount",
        nfs3.parse_mount,
        OK + opaque(b"roothandle") + words(2, 1, 6),
        nfs3.Mounted(b"roothandle", (1, 6)),
    ),
]
# Bytes at the end that a parser need not look at.
UNREAD = {"lookup": 4, "lookup without attributes": 4, "fsstat": 4, "fsinfo": 12}


@pytest.mark.parametrize(("name", "parse", "record", "value"), RESULTS, ids=[r[0] for r in RESULTS])
def test_results(name, parse, record, value):
    assert parse(record, 0) == value
    assert parse(b"\xee" * 12 + record, 12) == value
    assert parse(memoryview(bytes(record)), 0) == value
    for end in range(len(record) - UNREAD.get(name, 0)):
        with pytest.raises(ProtocolError):
            parse(record[:end], 0)


@pytest.mark.parametrize("parse", [r[1] for r in RESULTS])
def test_a_status_is_no_result(parse):
    with pytest.raises(ProtocolError):
        parse(words(70) + bytes(200), 0)
    assert nfs3.status_of(words(70), 0) == nfs3.Status.STALE


def test_exports():
    record = YES + opaque(b"/a") + YES + opaque(b"10.0.0.0/8") + NO + YES + opaque(b"/b") + NO + NO
    assert nfs3.parse_exports(record, 0) == [b"/a", b"/b"]
    for end in range(len(record)):
        with pytest.raises(ProtocolError):
            nfs3.parse_exports(record[:end], 0)


@pytest.mark.parametrize(
    "record",
    [
        OK + NO + b"VERIFIER" + entry(1, b"n", 1, False, b"h" * 65) + NO + YES,
        OK + NO + b"VERIFIER" + words(2) + bytes(40),
        OK + NO + b"VERIFIER" + YES + struct.pack(">QI", 1, 2**31) + bytes(40),
        OK + NO + b"VERIFIER" + NO + words(2),
        OK + NO + b"VERIFIER" + YES + bytes(8) + opaque(b"n") + bytes(8) + words(0, 3, 0, 0),
    ],
)
def test_pages_that_are_none(record):
    with pytest.raises(ProtocolError):
        nfs3.parse_readdirplus(record, 0)


def test_pack_attributes_is_the_inverse():
    assert nfs3.pack_attributes(ATTRIBUTES) == FATTR


def test_arguments():
    assert nfs3.handle_arguments(b"abcde") == words(5) + b"abcde\0\0\0"
    assert nfs3.lookup_arguments(b"dddd", b"n") == words(4) + b"dddd" + words(1) + b"n\0\0\0"
    assert nfs3.read_arguments(b"hhhh", 2**40, 4096) == words(4) + b"hhhh" + struct.pack(
        ">QI", 2**40, 4096
    )
    assert nfs3.readdirplus_arguments(b"hhhh", 7, b"VERIFIER", 100, 200) == (
        words(4) + b"hhhh" + struct.pack(">Q", 7) + b"VERIFIER" + words(100, 200)
    )
    assert nfs3.readdir_arguments(b"hhhh", 7, b"VERIFIER", 100) == (
        words(4) + b"hhhh" + struct.pack(">Q", 7) + b"VERIFIER" + words(100)
    )


ACCEPTED = words(77, 1, 0, 0, 0, 0)


def test_read_head_usual():
    record = ACCEPTED + OK + YES + FATTR + words(3, 1, 3) + b"abc\0"
    head = nfs3.parse_read_head(record)
    assert head == nfs3.ReadHead(77, 0, ATTRIBUTES, 3, True, nfs3.READ_HEAD_SIZE)
    assert record[head.data : head.data + head.count] == b"abc"
    for end in range(nfs3.READ_HEAD_SIZE):
        assert nfs3.parse_read_head(record[:end]) is None or end < nfs3.READ_HEAD_SIZE


def test_read_head_unusual():
    bare = nfs3.parse_read_head(ACCEPTED + OK + NO + words(4, 0, 4) + b"abcd")
    assert bare == nfs3.ReadHead(77, 0, None, 4, False, 44)
    stale = nfs3.parse_read_head(ACCEPTED + words(70) + NO)
    assert (stale.status, stale.count) == (70, 0)
    verifier = words(77, 1, 0, 0, 8) + bytes(8) + OK
    with_verifier = nfs3.parse_read_head(verifier + OK + YES + FATTR + words(4, 0, 4) + b"abcd")
    assert (with_verifier.attributes, with_verifier.data) == (ATTRIBUTES, 24 + 8 + 92 + 12)
    assert nfs3.parse_read_head(words(77, 1, 1, 1, 5)) is None  # denied
    assert nfs3.parse_read_head(words(77, 1, 0, 0, 0, 1)) is None  # no such program
    for record in (
        ACCEPTED + OK + YES + FATTR + words(3, 1, 4) + b"abcd",
        ACCEPTED + OK + NO + words(3, 1, 4) + b"abcd",
        ACCEPTED + OK + YES + FATTR + words(3, 2, 3) + b"abc\0",
    ):
        with pytest.raises(ProtocolError):
            nfs3.parse_read_head(record)


PARSERS = [r[1] for r in RESULTS] + [nfs3.parse_exports]


@given(st.binary(max_size=400))
def test_garbage_raises_protocol_errors_only(data):
    for record in (data, OK + data, OK + NO + data):
        for parse in PARSERS:
            try:
                parse(record, 0)
            except ProtocolError:
                continue
    for record in (data, ACCEPTED + data, ACCEPTED + OK + data):
        try:
            nfs3.parse_read_head(record)
        except ProtocolError:
            continue


@given(st.data())
def test_a_flipped_byte_raises_protocol_errors_only(data):
    page = bytearray(PAGE)
    page[data.draw(st.integers(0, len(page) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        nfs3.parse_readdirplus(bytes(page), 0)


def test_packer_is_what_the_tables_use():
    assert bytes(Packer().boolean(True).data) == YES
