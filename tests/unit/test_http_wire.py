"""The wire against scripted peers: framing, kept links, cuts, limits, interrupts."""

import contextlib
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfs.backends.http_wire import Wire
from hsfs.core.errors import HsfsError, Interrupted, ProtocolError, TimedOut, Unavailable
from hsfs.core.interruption import Interruption
from tests.servers.scripted_peer import Peer

REQUEST = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


@contextlib.contextmanager
def wire_to(*scripts, timeout_s=20.0):
    with Peer(*scripts) as peer:
        wire = Wire("127.0.0.1", peer.port, tls=None, timeout_s=timeout_s, name="peer")
        try:
            yield wire, peer
        finally:
            wire.close()


def whole(wire, **options):
    with wire.exchange(REQUEST, Interruption(), **options) as reply:
        return reply.status, reply.read_all(1 << 20)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Y:  z \r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nTrailer: t\r\n\r\n"
)


@pytest.mark.parametrize("answer", [OK, CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_framing_in_any_pieces(answer, step):
    pieces = [answer[i : i + step] for i in range(0, len(answer), step)]
    with wire_to([pieces, pieces]) as (wire, peer):
        for _ in range(2):  # the link is kept
            assert whole(wire) == (200, b"hello")
        assert peer.connections == 1


def test_fields_are_found_by_lower_case_names():
    with wire_to([[OK]]) as (wire, _), wire.exchange(REQUEST, Interruption()) as reply:
        assert reply.fields[b"x-y"] == b"z"
        assert reply.length == 5


def test_a_big_body_goes_into_the_callers_memory():
    body = bytes(range(256)) * 4096 * 5
    head = b"HTTP/1.1 206 Partial\r\nContent-Length: %d\r\n\r\n" % len(body)
    with wire_to([[head + body[:100], body[100:3_000_001], body[3_000_001:]], [OK]]) as (
        wire,
        peer,
    ):
        frame = bytearray(len(body) + 2)
        with wire.exchange(REQUEST, Interruption()) as reply:
            view = memoryview(frame)
            assert reply.read_into(view[1:1_000_001]) == 1_000_000
            assert reply.read_into(view[1_000_001 : len(body) + 1]) == len(body) - 1_000_000
            assert reply.complete
            assert reply.read_into(view[:1]) == 0
        assert frame == b"\0" + body + b"\0"
        assert whole(wire) == (200, b"hello")
        assert peer.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\na: b\r\n\r\n" + OK,
    ],
)
def test_other_frames(answer):
    with wire_to([[answer, None]], [[OK]]) as (wire, _):
        assert whole(wire) == (200, b"hello")
        assert whole(wire) == (200, b"hello")


def test_bodiless_answers():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    with wire_to([[head], [b"HTTP/1.1 204 No\r\n\r\n"], [OK]]) as (wire, peer):
        assert whole(wire, bodiless=True) == (200, b"")
        assert whole(wire) == (204, b"")
        assert whole(wire) == (200, b"hello")
        assert peer.connections == 1


def test_an_unread_body_costs_the_link_and_a_small_one_can_be_drained():
    with wire_to([[OK], [OK], [OK]], [[OK]]) as (wire, peer):
        wire.exchange(REQUEST, Interruption()).drain()
        assert whole(wire) == (200, b"hello")
        assert peer.connections == 1
        wire.exchange(REQUEST, Interruption()).close()
        assert whole(wire) == (200, b"hello")
        assert peer.connections == 2


def test_a_link_that_the_server_closed_meanwhile_is_replaced_at_once():
    with wire_to([[OK, None]], [[OK, None]], [[OK]]) as (wire, peer):
        for _ in range(3):
            assert whole(wire) == (200, b"hello")
        assert peer.connections == 3


def test_a_fresh_link_that_is_closed_is_an_error():
    with wire_to([[None]]) as (wire, _), pytest.raises(Unavailable, match="closed"):
        whole(wire)


def test_a_cut_body_is_told_from_its_end():
    with wire_to([[OK[:-2], None]], [[CHUNKED[:-20], None]]) as (wire, _):
        with wire.exchange(REQUEST, Interruption()) as reply:
            assert reply.read_into(memoryview(bytearray(9))) == 3
            assert not reply.complete
        with pytest.raises(Unavailable, match="cut"):
            whole(wire)


def test_silence_is_noticed():
    with wire_to([[600]], [[OK[:-2], 600]], timeout_s=0.3) as (wire, peer):
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(TimedOut, match=r"0\.3 s"):
                whole(wire)
            assert time.monotonic() - start < 20
            peer.stop.set()
            peer.stop = threading.Event()


def test_a_trickle_is_no_progress():
    slow = [OK[:-5], *[b"h", 0.15] * 200]
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 500000\r\n\r\n"
    with wire_to([[answer, *slow]], timeout_s=0.5) as (wire, peer):
        with wire.exchange(REQUEST, Interruption()) as reply, pytest.raises(TimedOut):
            reply.read_into(memoryview(bytearray(400_000)))
        peer.stop.set()


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    wire = Wire("127.0.0.1", port, tls=None, timeout_s=5, name="peer")
    with pytest.raises(Unavailable, match=str(port)):
        whole(wire)
    wire = Wire("no.such.host.invalid", port, tls=None, timeout_s=5, name="peer")
    with pytest.raises(Unavailable, match="invalid"):
        whole(wire)


@pytest.mark.parametrize("head", [b"", OK[:-2]], ids=["head", "body"])
def test_an_interrupt_ends_the_wait(head):
    with wire_to([[head, 600]], [[OK]]) as (wire, peer):
        stop = Interruption()
        timer = threading.Timer(0.1, stop.set)
        timer.start()
        with pytest.raises(Interrupted), wire.exchange(REQUEST, stop) as reply:
            reply.read_into(memoryview(bytearray(5)))
        timer.join()
        peer.stop.set()
        with pytest.raises(Interrupted), wire.exchange(REQUEST, stop):
            pass  # already interrupted


def test_closing_ends_the_wait():
    with wire_to([[600]]) as (wire, peer):
        timer = threading.Timer(0.1, wire.close)
        timer.start()
        with pytest.raises(Unavailable, match="closed"):
            whole(wire)
        timer.join()
        peer.stop.set()
        with pytest.raises(Unavailable, match="closed"):
            whole(wire)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
    ],
)
def test_what_is_not_http(answer):
    with wire_to([[answer]]) as (wire, _), pytest.raises(ProtocolError):
        whole(wire)


@given(st.binary(max_size=60), st.integers(0, len(CHUNKED)))
def test_garbage_is_only_our_errors(junk, at):
    for answer in (junk, CHUNKED[:at] + junk, OK[:at] + junk):
        with wire_to([[answer, None]], timeout_s=20) as (wire, _), contextlib.suppress(HsfsError):
            whole(wire)
