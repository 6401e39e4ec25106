"""The NFS-Ganesha launcher: starts, serves, forgets nothing, leaves nothing."""

import os
import socket
import struct
import time
from pathlib import Path

import pytest

from tests.servers import ports
from tests.servers.ganesha import Ganesha
from tests.servers.process import ServerError


class Rpc:
    """Just enough of NFSv3 (RFC 1813) to see that a server serves; not the product's client."""

    def __init__(self, port):
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def call(self, program, procedure, arguments):
        credentials = struct.pack(">III", 0, 0, 0) + struct.pack(">III", 0, 0, 0)
        auth = struct.pack(">II", 1, len(credentials) - 4) + credentials[:-4]
        call = struct.pack(">IIIIII", 7, 0, 2, program, 3, procedure) + auth + bytes(8) + arguments
        self._socket.sendall(struct.pack(">I", 0x80000000 | len(call)) + call)
        reply = b""
        last = False
        while not last:
            mark = struct.unpack(">I", self._exactly(4))[0]
            last = bool(mark & 0x80000000)
            reply += self._exactly(mark & 0x7FFFFFFF)
        assert reply[4:24] == struct.pack(">IIIII", 1, 0, 0, 0, 0)
        return reply[24:]

    def _exactly(self, n):
        data = b""
        while len(data) < n:
            more = self._socket.recv(n - len(data))
            assert more, "connection closed"
            data += more
        return data


def opaque(value):
    return struct.pack(">I", len(value)) + value + bytes(-len(value) % 4)


def mount_root(server, path):
    with Rpc(server.mount_port) as mount:
        reply = mount.call(100005, 1, opaque(os.fsencode(path)))
    status, length = struct.unpack(">II", reply[:8])
    assert status == 0
    return reply[8 : 8 + length]


def look_up(nfs, root, name):
    reply = nfs.call(100003, 3, opaque(root) + opaque(name))
    status, length = struct.unpack(">II", reply[:8])
    assert status == 0
    return reply[8 : 8 + length]


def size_of(nfs, handle):
    reply = nfs.call(100003, 1, opaque(handle))
    assert reply[:4] == bytes(4)
    return struct.unpack(">Q", reply[24:32])[0]


def read(nfs, handle, count):
    reply = nfs.call(100003, 6, opaque(handle) + struct.pack(">QI", 0, count))
    assert reply[:8] == struct.pack(">II", 0, 1)
    got = struct.unpack(">I", reply[92:96])[0]
    return reply[104 : 104 + got]


def test_serves_shows_changes_at_once_and_keeps_handles(tmp_path):
    (tmp_path / "file").write_bytes(b"hello")
    with Ganesha(tmp_path) as server:
        root = mount_root(server, server.export)
        with Rpc(server.port) as nfs:
            handle = look_up(nfs, root, b"file")
            assert read(nfs, handle, 100) == b"hello"
            assert size_of(nfs, handle) == 5
            # Behind the server's back, as a filer's other clients do it.
            (tmp_path / "file").write_bytes(b"hello again")
            assert size_of(nfs, handle) == 11
            (tmp_path / "new").write_bytes(b"1")
            look_up(nfs, root, b"new")
        server.restart()
        with Rpc(server.port) as nfs:
            assert read(nfs, handle, 100) == b"hello again"


def test_pause_keeps_the_connection_and_resume_answers(tmp_path):
    with Ganesha(tmp_path) as server:
        root = mount_root(server, server.export)
        with Rpc(server.port) as nfs:
            server.pause()
            state = Path("/proc", str(server.pid), "stat").read_text().rpartition(")")[2].split()[0]
            assert state == "T"
            server.resume()
            assert size_of(nfs, root) > 0


def test_two_side_by_side_and_nothing_left(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with Ganesha(one) as first, Ganesha(two) as second:
        pids = first.pids + second.pids
        assert len(pids) >= 6
        assert mount_root(first, one) != mount_root(second, two)
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if Path("/proc", str(pid)).exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    for server in (first, second):
        assert ports.can_bind(server.port)
    assert not server.folder.exists()


def test_a_failed_start_raises_with_the_log(tmp_path):
    server = Ganesha(tmp_path, extra_config="NOT A CONFIGURATION")
    with pytest.raises(ServerError, match="ended with") as failed:
        server.start()
    assert "ganesha.conf" in str(failed.value)
    assert not server.folder.exists()
