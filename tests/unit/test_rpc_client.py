"""The trio client against a real server loop: calls, pushes, loss, leases, what may be cached."""

import asyncio
import socket
import stat
import time

import pytest
import trio

from hsfs.core.errors import (
    NotFound,
    NotSupported,
    PermissionDenied,
    ProtocolError,
    TimedOut,
    Unauthorised,
    Unavailable,
    Unsupported,
    UsageError,
)
from hsfs.core.ports import Invalidation
from hsfs.proto import messages as m
from hsfs.proto.frames import Splitter, decode_answer, encode_push, encode_request
from hsfs.rpc import address as addresses
from hsfs.rpc.address import Address, parse_address, parse_listen
from hsfs.rpc.blocking import BlockingClient
from hsfs.rpc.client import connect
from hsfs.rpc.greeting import read_welcome
from tests.unit.rpc_server import TinyServer, node

LIMIT_S = 60


async def collect(client, into):
    async for records in client.invalidations():
        into.extend(records)


async def until(condition):
    with trio.fail_after(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - other threads change it
            await trio.sleep(0.01)


async def test_calls_and_errors(tmp_path):
    with TinyServer(tmp_path) as server:
        async with connect(server.address) as client:
            assert await client.lookup(1, b"a") == node(2, 10)
            with pytest.raises(NotFound) as caught:
                await client.getattr(99)
            assert (caught.value.what, caught.value.why) == ("inode 99", "gone")
            assert caught.value.next_step == "look again"
            with pytest.raises(NotSupported):
                await client.walk(b"/")
            server.nodes[666] = node(666)
            with pytest.raises(Unavailable, match="internal error"):
                await client.getattr(666)
            assert (await client.getattr(2)).attributes.size == 10
            assert client.welcome.volume == "vol"


async def test_many_calls_at_once_on_one_stream(tmp_path):
    with TinyServer(tmp_path) as server:
        for ino in range(10, 510):
            server.nodes[ino] = node(ino, ino)
        got = {}
        async with connect(server.address) as client:

            async def one(ino):
                got[ino] = (await client.getattr(ino)).attributes.size

            async with trio.open_nursery() as nursery:
                for ino in range(10, 510):
                    nursery.start_soon(one, ino)
        assert got == {ino: ino for ino in range(10, 510)}


async def test_cancelled_call_leaves_the_client_usable(tmp_path):
    with TinyServer(tmp_path) as server:
        async with connect(server.address) as client:
            server.before_answer[m.Op.LOOKUP] = lambda: asyncio.sleep(LIMIT_S)
            with trio.move_on_after(0.05) as scope:
                await client.lookup(1, b"a")
            assert scope.cancelled_caught
            assert (await client.getattr(2)).attributes.ino == 2


async def test_errors_of_the_body_are_not_wrapped(tmp_path):
    with TinyServer(tmp_path) as server, pytest.raises(KeyError):
        async with connect(server.address):
            raise KeyError("mine")


async def test_push_reaches_both_clients_in_order(tmp_path):
    with TinyServer(tmp_path) as server:
        async with (
            connect(server.address) as one,
            connect(server.address) as two,
            trio.open_nursery() as nursery,
        ):
            seen = ([], [])
            nursery.start_soon(collect, one, seen[0])
            nursery.start_soon(collect, two, seen[1])
            for ino in range(20):
                await trio.to_thread.run_sync(server.push, ino + 5, b"n%d" % ino)
            await until(lambda: len(seen[0]) == len(seen[1]) == 20)
            assert seen[0] == seen[1]
            assert [r.seq for r in seen[0]] == list(range(1, 21))
            assert one.applied_seq == 20
            nursery.cancel_scope.cancel()


async def test_reply_older_than_an_applied_push_is_not_cached(tmp_path):
    with TinyServer(tmp_path) as server:
        async with connect(server.address) as client:
            # The answer was read before the push; the server's seq is taken when it is sent, so
            # the frame is made here as a slower server would send it.
            client._pushed(_push(1, 5, ((2, b"", 3), (7, b"x", 5))))
            stale = client._aged(node(2), 2)
            assert stale.ttl_s == 0.0
            assert client._aged(node(2), 3).ttl_s == 30.0
            assert client._aged(node(9), 2).ttl_s == 30.0
            assert client._aged(node(9), 4, parent=7).ttl_s == 0.0


def _push(first, last, records):
    frame = encode_push(1, first, last, tuple(Invalidation(*r) for r in records))
    return decode_answer(Splitter().feed(frame)[0])


async def test_gap_and_forget(tmp_path):
    with TinyServer(tmp_path) as server:
        async with connect(server.address) as client, trio.open_nursery() as nursery:
            seen = []
            nursery.start_soon(collect, client, seen)
            client._pushed(_push(1, 1, ((2, b"", 1),)))
            client._pushed(_push(5, 6, ((2, b"", 6),)))  # 2..4 never came
            await until(lambda: len(seen) == 2)
            assert [r.ino for r in seen] == [2, 0]
            assert client.applied_seq == 6
            client._pushed(_push(3, 4, ((2, b"", 4),)))  # older than what we know
            client._pushed(_push(7, 7, ((3, b"", 7),)))
            await until(lambda: len(seen) == 3)
            assert seen[-1].ino == 3
            nursery.cancel_scope.cancel()


async def test_slow_consumer_is_bounded(tmp_path):
    with TinyServer(tmp_path) as server:
        async with connect(server.address) as client:
            for begin in range(1, 200_000, 4000):
                records = tuple((5, b"", seq) for seq in range(begin, begin + 4000))
                client._pushed(_push(begin, begin + 3999, records))
            assert len(client._upcalls) <= 64 * 1024 + 4000
            assert client._upcalls[0].ino == 0


async def test_reconnects_and_hears_what_it_missed(tmp_path):
    with TinyServer(tmp_path) as server:
        async with connect(server.address) as client, trio.open_nursery() as nursery:
            seen = []
            nursery.start_soon(collect, client, seen)
            await trio.to_thread.run_sync(server.push, 5)
            await until(lambda: len(seen) == 1)
            await trio.to_thread.run_sync(server.drop_connections)
            await trio.to_thread.run_sync(server.push, 6)
            assert (await client.getattr(2)).attributes.ino == 2
            await until(lambda: len(seen) == 2)
            assert [r.ino for r in seen] == [5, 6]
            nursery.cancel_scope.cancel()


async def test_call_in_flight_survives_a_lost_connection_and_runs_once(tmp_path):
    with TinyServer(tmp_path) as server:
        async with connect(server.address) as client, trio.open_nursery() as nursery:
            results = []

            async def refresh():
                results.append(await client.refresh(1, True))

            nursery.start_soon(refresh)
            await until(lambda: "refresh" in server.calls)
            await trio.to_thread.run_sync(server.drop_connections)
            await until(lambda: results)
            assert results == [7]
            assert server.calls.count("refresh") == 1


async def test_restarted_server_with_the_journal_keeps_the_cache(tmp_path):
    with TinyServer(tmp_path, records=[(5, b""), (6, b"")]) as first:
        async with connect(first.address) as client, trio.open_nursery() as nursery:
            seen = []
            nursery.start_soon(collect, client, seen)
            await trio.to_thread.run_sync(first.stop)
            missed = [(5, b""), (6, b""), (7, b"x")]
            second = TinyServer(tmp_path, epoch=2, records=missed)
            with second:
                await until(lambda: len(seen) == 1)
                assert seen == [Invalidation(7, b"x", 3)]
                assert client.welcome.epoch == 2
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "how", [{"records": []}, {"records": [(5, b""), (6, b"")], "store": b"other"}]
)
async def test_another_store_behind_the_address_drops_the_cache(tmp_path, how):
    with TinyServer(tmp_path, records=[(5, b""), (6, b"")]) as first:
        async with connect(first.address) as client, trio.open_nursery() as nursery:
            seen = []
            nursery.start_soon(collect, client, seen)
            await trio.to_thread.run_sync(first.stop)
            with TinyServer(tmp_path, epoch=2, **how):
                await until(lambda: seen)
                assert seen[0].ino == 0
            nursery.cancel_scope.cancel()


async def test_trimmed_journal_drops_the_cache(tmp_path):
    with TinyServer(tmp_path, records=[(5, b"")]) as first:
        async with connect(first.address) as client, trio.open_nursery() as nursery:
            seen = []
            nursery.start_soon(collect, client, seen)
            await trio.to_thread.run_sync(first.stop)
            second = TinyServer(tmp_path, epoch=2, records=[(5, b"")] * 9)
            with second:
                await until(lambda: len(seen) >= 8)
                second.do(setattr, second.journal, "floor", 9)
                second.do(second.journal.add, 1)
                second.drop_connections()
                await until(lambda: client.applied_seq >= 10)
            nursery.cancel_scope.cancel()


async def test_revive_is_called_when_nobody_listens(tmp_path):
    servers = []
    with TinyServer(tmp_path) as first:

        async def revive():
            if not servers:
                servers.append(TinyServer(tmp_path, epoch=2))
                servers[0].__enter__()

        async with connect(first.address, revive=revive) as client:
            await trio.to_thread.run_sync(first.stop)
            assert (await client.getattr(2)).attributes.ino == 2
            assert client.welcome.epoch == 2
        servers[0].stop()


async def test_silence_times_out_and_the_lease_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("hsfs.rpc.client.PING_S", 0.2)
    with TinyServer(tmp_path, lease_s=6.0) as server:
        async with connect(server.address, timeout_s=2.0) as client:
            assert client.lease_left_s() > 0
            seen = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(collect, client, seen)
                await until(lambda: server.calls.count("ping") >= 2)
                assert not seen  # pings keep the lease
                await trio.to_thread.run_sync(server.stop)
                with pytest.raises((Unavailable, TimedOut)):
                    await client.getattr(2)
                await until(lambda: seen)
                assert seen[0].ino == 0
                assert client.lease_left_s() == 0
                nursery.cancel_scope.cancel()


async def test_silent_listener_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("hsfs.rpc.client.HELLO_TIMEOUT_S", 0.3)
    path = tmp_path / "mds.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(TimedOut):
            async with connect(Address(path=path)):
                pass


async def test_listener_that_speaks_something_else(tmp_path):
    path = tmp_path / "mds.sock"

    async def speak(stream):
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    listener = trio.socket.socket(socket.AF_UNIX)
    await listener.bind(str(path))
    listener.listen()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, speak, [trio.SocketListener(listener)])
        with pytest.raises(ProtocolError):
            async with connect(Address(path=path)):
                pass
        nursery.cancel_scope.cancel()


async def test_no_server(tmp_path):
    with pytest.raises(Unavailable, match="no metadata server"):
        async with connect(Address(path=tmp_path / "mds.sock")):
            pass


async def test_tcp_needs_the_token_and_the_right_volume(tmp_path):
    with TinyServer(tmp_path, tcp=True) as server:
        address = server.tcp_address
        async with connect(address, token="secret") as client:
            assert (await client.getattr(2)).attributes.ino == 2
        for token in ("", "wrong", "secret\n", "sécret"):
            with pytest.raises(Unauthorised):
                async with connect(address, token=token):
                    pass
        other = Address(host=address.host, port=address.port, volume="other")
        with pytest.raises(NotFound, match='serves "vol"'):
            async with connect(other, token="secret"):
                pass


async def test_tcp_beyond_loopback_is_refused():
    with pytest.raises(NotSupported, match="TLS"):
        async with connect(Address(host="10.0.0.1", port=7420, volume="v")):
            pass
    with pytest.raises(NotSupported):
        parse_listen("0.0.0.0:7420")
    assert parse_listen("[::1]:7420") == ("::1", 7420)
    assert parse_listen("localhost:0") == ("127.0.0.1", 0)


def test_socket_is_for_its_user_only_and_long_paths_work(tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with TinyServer(deep) as server:
        assert stat.S_IMODE(server.address.path.stat().st_mode) == 0o600
        with BlockingClient(server.address) as client:
            assert client.call(m.Op.GETATTR, m.InodeArgs(2)).attributes.ino == 2


def test_garbage_ends_its_connection_only(tmp_path):
    with TinyServer(tmp_path) as server, BlockingClient(server.address) as good:
        hello = encode_request(1, m.Op.HELLO, None, m.Hello(1, 1, "mount", b"c" * 16))
        for garbage in (
            b"\0\0\0\0",
            b"\xff" * 64,
            b"\0\0\0\1\xc1",
            encode_request(1, m.Op.GETATTR, None, m.InodeArgs(2)),  # before HELLO
            hello + hello,
            hello[:-3] + b"\0\0\0",
        ):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(LIMIT_S)
                sock.connect(str(server.address.path))
                sock.sendall(garbage)
                try:
                    while sock.recv(65536):
                        pass
                except ConnectionResetError:
                    pass
        assert good.call(m.Op.GETATTR, m.InodeArgs(2)).attributes.ino == 2
        with pytest.raises(ProtocolError):
            good.call(m.Op.LOOKUP, m.InodeArgs(2))
        assert good.call(m.Op.GETATTR, m.InodeArgs(2)).attributes.ino == 2


def test_unknown_versions_and_kinds_are_refused(tmp_path):
    def greet(hello):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(LIMIT_S)
            sock.connect(str(server.address.path))
            sock.sendall(encode_request(1, m.Op.HELLO, None, hello))
            return read_welcome(Splitter().feed(sock.recv(65536))[0])

    with TinyServer(tmp_path) as server:
        assert greet(m.Hello(1, 7, "tool", b"c" * 16)).version == 1
        with pytest.raises(Unsupported):
            greet(m.Hello(2, 3, "tool", b"c" * 16))
        with pytest.raises(ProtocolError):
            greet(m.Hello(1, 1, "spy", b"c" * 16))


def test_a_slow_reader_does_not_hold_the_server(tmp_path):
    with (
        TinyServer(tmp_path) as server,
        BlockingClient(server.address) as good,
        socket.socket(socket.AF_UNIX) as slow,
    ):
        slow.settimeout(LIMIT_S)
        slow.connect(str(server.address.path))
        hello = m.Hello(1, 1, "mount", b"s" * 16)
        slow.sendall(encode_request(1, m.Op.HELLO, None, hello))
        slow.recv(65536)

        def flood():
            for _ in range(100_000):
                server.journal.add(5, b"x" * 100)

        server.do(flood)
        assert good.call(m.Op.GETATTR, m.InodeArgs(2)).attributes.ino == 2
        deadline = time.monotonic() + LIMIT_S
        splitter, last, forgot = Splitter(), 0, False
        while last < 100_000:
            assert time.monotonic() < deadline
            for body in splitter.feed(slow.recv(1 << 20)):
                answer = decode_answer(body)
                assert answer.second <= max(last + 1, answer.third)
                last = answer.third
                forgot = forgot or bytes(answer.body) == b"\xc0"
        assert forgot  # it was too far behind to be told everything


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/x.sock", Address(path=addresses.Path("/run/x.sock"))),
        ("hsfs://localhost/ai", Address(host="localhost", port=7420, volume="ai")),
        ("hsfs://[::1]:9/ai", Address(host="::1", port=9, volume="ai")),
    ],
)
def test_addresses(text, address):
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["unix:x", "hsfs://h", "hsfs:///v", "http://h/v", "hsfs://h:p/v", "hsfs://h/a/b", ""]
)
def test_bad_addresses(text):
    with pytest.raises(UsageError):
        parse_address(text)


def test_token_file_must_be_private(tmp_path):
    path = tmp_path / "token"
    path.write_text("abc\n")
    path.chmod(0o644)
    with pytest.raises(PermissionDenied, match="others"):
        addresses.read_token(path)
    path.chmod(0o600)
    assert addresses.read_token(path) == "abc"
    with pytest.raises(Unauthorised):
        addresses.read_token(tmp_path / "none")
