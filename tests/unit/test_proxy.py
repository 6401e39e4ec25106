"""The fault proxy in front of a real S3 server, and over plain TCP."""

import contextlib
import http.client
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from tests.servers import ports, s3_data
from tests.servers.proxy import Proxy
from tests.servers.rclone_s3 import RcloneS3

BODY = bytes(range(256)) * 4096


@pytest.fixture(scope="module")
def origin():
    with RcloneS3() as server:
        server.create_bucket("bucket")
        server.put_many("bucket", [("big", BODY), ("small", b"0123456789")])
        yield server


@pytest.fixture
def proxy(origin):
    with Proxy(origin.port) as running:
        yield running


@contextlib.contextmanager
def s3_through(proxy, origin):
    client = s3_data.client(proxy.endpoint, origin.access_key, origin.secret_key)
    try:
        yield client
    finally:
        client.close()


_urls = {}


def get(proxy, origin, key="big", *, connection=None, timeout=60):
    """Status, headers and body by plain HTTP: a client that hides nothing."""
    if (origin.port, key) not in _urls:
        with s3_through(origin, origin) as s3:
            _urls[origin.port, key] = urlsplit(
                s3.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": key})
            )
    url = _urls[origin.port, key]
    own = connection is None
    connection = connection or http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout)
    try:
        # The signature covers the host; the proxy passes it on.
        connection.request("GET", f"{url.path}?{url.query}", headers={"Host": url.netloc})
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        if own:
            connection.close()


def test_forwards_and_counts(proxy, origin):
    with s3_through(proxy, origin) as s3:
        s3.put_object(Bucket="bucket", Key="new", Body=b"x" * 100_000)
        assert s3.get_object(Bucket="bucket", Key="new")["Body"].read() == b"x" * 100_000
        assert s3.head_object(Bucket="bucket", Key="new")["ContentLength"] == 100_000
        assert s3.list_objects_v2(Bucket="bucket")["KeyCount"] == 3
        s3.delete_object(Bucket="bucket", Key="new")
    counts = proxy.counts()
    assert counts["requests"] == 5
    assert counts["connections"] >= 1
    assert counts["bytes_up"] > 100_000
    assert counts["bytes_down"] > 100_000
    seen = proxy.requests()
    assert [r.method for r in seen] == ["PUT", "GET", "HEAD", "GET", "DELETE"]
    assert (seen[1].target, seen[1].status, seen[1].body) == ("/bucket/new", 200, 100_000)
    proxy.forget()
    assert proxy.counts()["requests"] == 0


def test_one_connection_carries_many_requests(proxy, origin):
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    for _ in range(20):
        assert get(proxy, origin, "small", connection=connection)[2] == b"0123456789"
    connection.close()
    assert proxy.counts()["connections"] == 1


def test_cut_resets_in_the_middle_once(proxy, origin):
    proxy.cut(after=70_000, times=1, path="/bucket/big", method="GET")
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        get(proxy, origin)
    assert get(proxy, origin)[2] == BODY
    assert proxy.counts()["fault_cut"] == 1


def test_truncate_closes_early_under_the_right_length(proxy, origin):
    proxy.truncate(after=70_000, min_body=1000)
    with pytest.raises(http.client.IncompleteRead) as failed:
        get(proxy, origin)
    assert failed.value.partial == BODY[:70_000]
    assert get(proxy, origin, "small")[2] == b"0123456789"


def test_short_is_well_formed_and_wrong(proxy, origin):
    proxy.short(after=70_000, path="big")
    status, headers, body = get(proxy, origin)
    assert (status, body) == (200, BODY[:70_000])
    assert headers["Content-Length"] == "70000"


def test_corrupt_inverts_one_byte_of_every_second_reply(proxy, origin):
    proxy.corrupt(offset=300_000, every=2)
    assert get(proxy, origin)[2] == BODY
    body = bytearray(get(proxy, origin)[2])
    assert body[300_000] == BODY[300_000] ^ 0xFF
    body[300_000] ^= 0xFF
    assert body == BODY


def test_error_documents_and_statuses(proxy, origin):
    proxy.error_body(times=1)
    status, _, body = get(proxy, origin)
    assert status == 200
    assert b"<Code>InternalError</Code>" in body
    proxy.status(503, retry_after_s=7, times=2)
    for _ in range(2):
        status, headers, _ = get(proxy, origin)
        assert (status, headers["Retry-After"]) == (503, "7")
    assert get(proxy, origin)[0] == 200


def test_hole_says_nothing_then_goes_on(proxy, origin):
    proxy.hole()
    with pytest.raises(TimeoutError):
        get(proxy, origin, "small", timeout=0.3)
    proxy.hole(on=False)
    assert get(proxy, origin, "small")[2] == b"0123456789"


def test_refuse_and_listen_again(proxy, origin):
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    get(proxy, origin, "small", connection=connection)
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        get(proxy, origin)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)):
        get(proxy, origin, "small", connection=connection)
    connection.close()
    proxy.refuse(on=False)
    assert get(proxy, origin)[2] == BODY


def test_cap_and_delay_take_their_time(proxy, origin):
    # Lower bounds only: how much longer it takes is the machine's affair.
    proxy.cap(4 << 20)
    start = time.monotonic()
    get(proxy, origin)
    assert time.monotonic() - start > 0.15
    proxy.clear()
    proxy.delay(0.3)
    start = time.monotonic()
    get(proxy, origin, "small")
    assert time.monotonic() - start >= 0.3


@contextlib.contextmanager
def echo_server():
    listener = socket.create_server(("127.0.0.1", 0))
    threads = []

    def serve(client):
        # A cut by the proxy reaches the server as a reset.
        with client, contextlib.suppress(OSError):
            while data := client.recv(65536):
                client.sendall(data)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threads.append(threading.Thread(target=serve, args=(client,)))
                threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in [acceptor, *threads]:
            thread.join(60)


def exchange(s, data):
    s.sendall(data)
    got = b""
    while len(got) < len(data):
        more = s.recv(65536)
        if not more:
            raise ConnectionResetError
        got += more
    return got


def test_tcp_forwards_delays_cuts_and_corrupts():
    with echo_server() as port, Proxy(port, mode="tcp") as proxy:

        def connect():
            return socket.create_connection(("127.0.0.1", proxy.port), timeout=60)

        with connect() as s:
            assert exchange(s, b"hello") == b"hello"
            assert exchange(s, BODY[:200_000]) == BODY[:200_000]
        proxy.cut(after=1000, times=1)
        with connect() as s, pytest.raises(ConnectionResetError):
            exchange(s, bytes(5000))
        proxy.corrupt(offset=10, times=1)
        with connect() as s:
            assert exchange(s, bytes(20)) == bytes(10) + b"\xff" + bytes(9)
        proxy.delay(0.2)
        with connect() as s:
            start = time.monotonic()
            assert exchange(s, b"late") == b"late"
            assert time.monotonic() - start >= 0.2
        proxy.clear()
        with connect() as s:
            assert exchange(s, b"hello") == b"hello"
            proxy.drop()
            assert s.recv(1) == b""


def test_nothing_is_left():
    with Proxy(1) as proxy:
        port, folder = proxy.port, proxy.folder
    assert ports.can_bind(port)
    assert not folder.exists()
