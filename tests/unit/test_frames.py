"""Frames of the metadata RPC: byte tables, any cutting of the stream, any garbage."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfs.core import errors
from hsfs.core.ports import Invalidation, Listing
from hsfs.core.types import Attributes, Entry, FileType, Node, Place, Replica
from hsfs.proto import frames
from hsfs.proto import messages as m

NODE = Node(
    Attributes(2, FileType.FILE, 0o644, 3, 4, 1, 5, 6, 7, 8),
    b"v",
    9,
    10,
    1.5,
    (Replica(1, Place(b"k", b"h"), b"v"),),
)

GOLDEN = {
    "request": (
        frames.encode_request(1, m.Op.LOOKUP, None, m.LookupArgs(1, b"a")),
        "00000009 94 01 0a c0 92 01 c4 01 61",
    ),
    "mutation": (
        frames.encode_request(300, m.Op.REFRESH, b"\1\2", m.RefreshArgs(2, True)),
        "0000000c 94 cd 01 2c 0e c4 02 01 02 92 02 c3",
    ),
    "reply": (frames.encode_reply(7, 2, 40, 5), "00000006 95 07 00 02 28 05"),
    "push": (
        frames.encode_push(2, 5, 6, (Invalidation(1, b"a", 6),)),
        "0000000c 95 00 02 05 06 91 93 01 c4 01 61 06",
    ),
    "forget": (frames.encode_push(2, 5, 9, None), "00000006 95 00 02 05 09 c0"),
    "error": (
        frames.encode_error(3, errors.NotFound("x", "y", "z"), 4),
        "0000001d 95 03 02 a8 4e6f74466f756e64 a1 78 94 a1 79 a1 7a cb 0000000000000000 04",
    ),
    "hello": (
        frames.encode_request(1, m.Op.HELLO, None, m.Hello(1, 1, "tool", b"c" * 2)),
        "00000017 94 01 01 c0 9a 01 01 a4 746f6f6c c4 02 6363 a0 a0 00 00 c4 00 90",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    frame, text = GOLDEN[name]
    assert frame.hex() == text.replace(" ", "")


def test_operation_numbers_are_for_ever():
    assert {op.name: int(op) for op in m.Op} == {
        "HELLO": 1,
        "PING": 2,
        "LOOKUP": 10,
        "GETATTR": 11,
        "LIST": 12,
        "REVALIDATE": 13,
        "REFRESH": 14,
        "WALK": 15,
        "INFO": 16,
        "DEVICES": 20,
        "SPACE": 21,
        "REPORT": 22,
        "STATUS": 23,
        "DEFINE": 24,
        "ASSIMILATE": 25,
        "SCANS": 26,
        "TAKE": 40,
        "PAGES": 41,
        "FINISH": 42,
    }
    assert set(m.SHAPES) == set(m.Op)


def test_whole_and_byte_by_byte():
    stream = b"".join(frame for frame, _ in GOLDEN.values())
    whole = frames.Splitter().feed(stream)
    assert len(whole) == len(GOLDEN)
    splitter = frames.Splitter()
    slow = []
    for at in range(len(stream)):
        slow += splitter.feed(stream[at : at + 1])
    assert slow == whole
    assert not splitter.partial


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=8), st.data())
def test_any_cutting_gives_the_same_bodies(bodies, data):
    stream = b"".join(len(b).to_bytes(4, "big") + b for b in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    splitter, got = frames.Splitter(), []
    for low, high in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += splitter.feed(stream[low:high])
    assert got == bodies


def test_truncated_stream_gives_nothing():
    frame, _ = GOLDEN["reply"]
    splitter = frames.Splitter()
    assert splitter.feed(frame[:-1]) == []
    assert splitter.partial


@pytest.mark.parametrize("length", [0, frames.FRAME_MAX + 1, 2**32 - 1])
def test_bad_length_ends_the_stream(length):
    with pytest.raises(errors.ProtocolError):
        frames.Splitter().feed(length.to_bytes(4, "big") + b"xx")


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_only(body):
    with contextlib.suppress(errors.ProtocolError):
        request = frames.decode_request(body)
        for decoder in m.ARGS_DECODERS.values():
            with contextlib.suppress(errors.ProtocolError):
                frames.decode_body(decoder, request.args, "args")
    with contextlib.suppress(errors.ProtocolError):
        answer = frames.decode_answer(body)
        with contextlib.suppress(errors.ProtocolError):
            frames.decode_error(answer)
        with contextlib.suppress(errors.ProtocolError):
            frames.decode_body(m.RECORDS_DECODER, answer.body, "push")
        for decoder in m.RESULT_DECODERS.values():
            with contextlib.suppress(errors.ProtocolError):
                frames.decode_body(decoder, answer.body, "result")


@given(st.binary(max_size=60))
def test_flipped_bytes_of_true_frames(noise):
    for frame, _ in GOLDEN.values():
        body = bytearray(frame[4:])
        for at, byte in enumerate(noise):
            body[(at * 7 + byte) % len(body)] ^= byte
        with contextlib.suppress(errors.ProtocolError):
            frames.decode_request(bytes(body))
        with contextlib.suppress(errors.ProtocolError):
            frames.decode_error(frames.decode_answer(bytes(body)))


@pytest.mark.parametrize("nesting", [b"\x91" * 5000 + b"\x00", b"\xdd\xff\xff\xff\xff"])
def test_hostile_msgpack(nesting):
    for decode in (frames.decode_request, frames.decode_answer):
        with pytest.raises(errors.ProtocolError):
            decode(nesting)
        with pytest.raises(errors.ProtocolError):
            decode(b"\x94\x01\x0a\xc0" + nesting[:-1])


def test_results_round_trip():
    listing = Listing((Entry(b"\xff/odd", NODE),), True, 3)
    body = frames.Splitter().feed(frames.encode_reply(1, 1, 1, listing))[0]
    answer = frames.decode_answer(body)
    assert frames.decode_body(m.RESULT_DECODERS[m.Op.LIST], answer.body, "x") == listing


def test_newer_peers_append_fields():
    body = msgspec.msgpack.encode([1, 10, None, [1, b"a", "a field of the future"]])
    request = frames.decode_request(body)
    args = frames.decode_body(m.ARGS_DECODERS[m.Op.LOOKUP], request.args, "x")
    assert args == m.LookupArgs(1, b"a")


def test_errors_come_back_as_themselves():
    error = errors.Throttled("s3", "slow down", "wait", retry_after_s=2.5)
    body = frames.Splitter().feed(frames.encode_error(9, error, 11))[0]
    back, seq = frames.decode_error(frames.decode_answer(body))
    assert isinstance(back, errors.Throttled)
    assert (back.what, back.why, back.next_step, back.retry_after_s, seq) == (
        "s3",
        "slow down",
        "wait",
        2.5,
        11,
    )


def test_too_long_is_refused_before_it_is_sent():
    with pytest.raises(errors.ProtocolError):
        frames.encode_reply(1, 1, 1, b"x" * (frames.FRAME_MAX + 1))
    long = errors.Unavailable("w" * 10**6, "y" * 10**6, "n" * 10**6)
    assert len(frames.encode_error(1, long)) < frames.FRAME_MAX
