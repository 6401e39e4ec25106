"""The metadata server as a process: start, join, races, refusals, its end, its faces."""

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from hsfs.cli.embedded import ensure_embedded
from hsfs.core.config import MdsConfig, encode_volume
from hsfs.core.errors import Busy, ConfigError, HsfsError, NotFound, Unauthorised, Unsupported
from hsfs.core.types import FileType
from hsfs.mdserver.lifecycle import lock_holder
from hsfs.rpc.address import Address, find_token
from hsfs.rpc.blocking import BlockingClient
from hsfs.rpc.client import connect
from tests.servers.mds import LIMIT_S, Mds, alive, children, end, make_volume

ROOT = Path(__file__).resolve().parents[2]


def until(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "sub" / "deep").mkdir(parents=True)
    for index in range(20):
        (folder / f"f{index:02}").write_bytes(b"x" * index)
        (folder / "sub" / "deep" / f"g{index:02}").write_bytes(b"y" * index)
    return folder


@pytest.fixture
def volume(tmp_path, source):
    made = make_volume(tmp_path / "state", {"d": f"file://{source}"})
    yield made
    pid = lock_holder(made.state)
    if pid:
        end(pid)


def test_start_join_and_the_whole_tree(volume):
    address = ensure_embedded(volume)
    pid = lock_holder(volume.state)
    assert ensure_embedded(volume) == address
    assert lock_holder(volume.state) == pid

    async def main():
        async with connect(address) as client:
            assert client.welcome.pid == pid
            node = await client.walk(b"/d/sub/deep/g07")
            assert (node.attributes.size, node.attributes.type) == (7, FileType.FILE)
            folder = await client.walk(b"/d")
            listing = await client.list(folder.attributes.ino, b"", 256)
            assert [e.name for e in listing.entries] == [
                *(b"f%02d" % i for i in range(20)),
                b"sub",
            ]
            with pytest.raises(NotFound):
                await client.lookup(folder.attributes.ino, b"nothing")
            info = await client.info(node.attributes.ino)
            assert info.path == b"/d/sub/deep/g07"
            assert await client.refresh(folder.attributes.ino, True) >= 40
            assert (await client.space()).known
            (device,) = await client.devices()
            assert (device.name, device.state) == ("d", "ok")
            status = await client.status()
            assert dict(status.sessions)["mount"] == 1

    trio.run(main)
    assert (volume.state / "mds.log").stat().st_mode & 0o077 == 0
    assert (volume.state / "mds.sock").stat().st_mode & 0o077 == 0
    assert (volume.state / "token").stat().st_mode & 0o077 == 0


def test_mounts_that_start_at_the_same_moment_share_one_server(volume):
    script = (
        "import sys; from hsfs.core.config import decode_volume;"
        "from hsfs.cli.embedded import ensure_embedded;"
        "from hsfs.rpc.blocking import BlockingClient;"
        "volume = decode_volume(sys.stdin.buffer.read());"
        "print(BlockingClient(ensure_embedded(volume)).welcome.pid)"
    )

    def one(_):
        done = subprocess.run(
            [sys.executable, "-I", "-c", script],
            input=encode_volume(volume),
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return int(done.stdout)

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        pids = set(pool.map(one, range(5)))
    assert pids == {lock_holder(volume.state)}


def test_killed_server_is_replaced_and_knows_what_it_knew(volume):
    address = ensure_embedded(volume)
    with BlockingClient(address) as client:
        ino = client.walk(b"/d/f03").attributes.ino
    first = lock_holder(volume.state)
    end(first)
    assert (volume.state / "mds.sock").exists()  # stale
    ensure_embedded(volume)
    assert lock_holder(volume.state) not in (None, first)
    with BlockingClient(address) as client:
        assert client.walk(b"/d/f03").attributes.ino == ino
        assert client.welcome.epoch == 2


def test_mover_is_restarted_and_ends_with_its_server(volume):
    ensure_embedded(volume)
    pid = lock_holder(volume.state)
    until(lambda: children(pid), "no mover was started")
    mover = children(pid)[0]
    end(mover)
    until(lambda: children(pid) and children(pid) != [mover], "the mover was not restarted")
    (second,) = children(pid)
    end(pid)
    until(lambda: not alive(second), "the mover outlives its server")


def test_second_server_is_refused_by_name_and_pid(volume):
    with Mds(volume) as mds:
        done = subprocess.run(
            [sys.executable, "-m", "tests.servers.mds", str(_definition(volume)), "{}"],
            cwd=ROOT,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        text = done.stderr.decode()
        assert done.returncode
        assert "Busy" in text
        assert '"t"' in text
        assert f"pid {mds.pid}" in text


def _definition(volume):
    path = volume.state / "again.json"
    path.write_bytes(encode_volume(volume))
    return path


def test_it_leaves_when_nobody_needs_it_and_not_before(volume):
    address = ensure_embedded(volume, idle_s=3)
    pid = lock_holder(volume.state)
    with BlockingClient(address) as client:
        for _ in range(9):
            time.sleep(0.5)
            assert client.status().pid == pid
    until(lambda: not alive(pid), "the idle server stays")
    assert lock_holder(volume.state) is None
    assert not (volume.state / "mds.sock").exists()
    assert not (volume.state / "mds.pid").exists()


def test_a_dead_backend_does_not_keep_it(tmp_path):
    volume = make_volume(
        tmp_path / "state",
        {"dead": "nfs://127.0.0.1/export?port=1&mountport=1"},
        'timeout = "1s"',
    )
    ensure_embedded(volume, idle_s=0.5)
    pid = lock_holder(volume.state)
    until(lambda: not alive(pid), "a scan in trouble keeps the server")


def test_it_leaves_when_its_state_is_removed(volume):
    ensure_embedded(volume)
    pid = lock_holder(volume.state)
    shutil.rmtree(volume.state)
    until(lambda: not alive(pid), "the server stays without its state")
    ensure_embedded(volume)
    assert lock_holder(volume.state) != pid


def test_stop_by_signal_is_clean(volume):
    ensure_embedded(volume)
    pid = lock_holder(volume.state)
    os.kill(pid, signal.SIGTERM)
    until(lambda: not alive(pid), "SIGTERM is ignored")
    assert not (volume.state / "mds.sock").exists()
    assert "Traceback" not in (volume.state / "mds.log").read_text()


def test_very_long_state_path(tmp_path, source):
    deep = tmp_path / ("a" * 80) / ("b" * 80)
    volume = make_volume(deep / "state", {"d": f"file://{source}"})
    try:
        with BlockingClient(ensure_embedded(volume)) as client:
            assert client.walk(b"/d/f05").attributes.size == 5
    finally:
        end(lock_holder(volume.state))


def test_a_start_that_fails_says_why(tmp_path, source, volume):
    state = tmp_path / "file"
    state.write_text("not a directory")
    with pytest.raises(HsfsError) as caught:
        ensure_embedded(replace(volume, state=state))
    assert str(state) in str(caught.value)
    # A store of the future.
    ensure_embedded(volume)
    end(lock_holder(volume.state))
    _make_newer(volume.state)
    with pytest.raises(Unsupported):
        ensure_embedded(volume)


def _make_newer(state):
    from hsfs.mdserver import schema
    from hsfs.mdserver.store.lmdb import LmdbStore

    store = LmdbStore(state / "meta")
    try:
        store.commit({}, {schema.SCHEMA_KEY: (schema.SCHEMA + 1).to_bytes(4, "big")})
    finally:
        store.close()


def test_a_running_server_takes_a_new_backend_in(tmp_path, volume):
    address = ensure_embedded(volume)
    other = tmp_path / "other"
    other.mkdir()
    (other / "new").write_bytes(b"12345")
    wider = make_volume(volume.state, {"d": volume.backends[0].url, "o": f"file://{other}"})
    pid = lock_holder(volume.state)
    ensure_embedded(wider)
    assert lock_holder(volume.state) == pid
    with BlockingClient(address) as client:
        assert client.walk(b"/o/new").attributes.size == 5
        assert client.walk(b"/d/f05").attributes.size == 5
        assert {device.name for device in client.devices()} == {"d", "o"}


def test_a_state_belongs_to_one_volume(volume):
    ensure_embedded(volume)
    with pytest.raises(ConfigError, match="serves"):
        ensure_embedded(replace(volume, name="another"))


def test_assimilate_again_and_unknown_backend(volume):
    with Mds(volume) as mds:
        (scan,) = mds.wait_scanned()
        assert (scan.entries, scan.directories) == (42, 3)
        with BlockingClient(mds.address) as client:
            with pytest.raises(NotFound):
                client.assimilate(("nope",))
            client.assimilate(("d",))
        (scan,) = mds.wait_scanned()
        assert scan.entries == 42
    with Mds(volume) as mds:
        (scan,) = mds.wait_scanned()
        assert scan.entries == 42
        assert "assimilated" not in mds.log  # it had been


def test_tcp_with_token(volume, monkeypatch):
    port = _free_port()
    with Mds(
        replace(volume, mds=MdsConfig(listen=f"127.0.0.1:{port}")), listen=f"127.0.0.1:{port}"
    ):
        address = Address(host="127.0.0.1", port=port, volume="t")
        monkeypatch.setenv("HSFS_TOKEN_FILE", str(volume.state / "token"))
        with BlockingClient(address, token=find_token(address)) as client:
            assert client.walk(b"/d/f05").attributes.size == 5
        with pytest.raises(Unauthorised):
            BlockingClient(address, token="guess")


def _free_port():
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_http_face(volume):
    port = _free_port()
    with Mds(volume, http=f"127.0.0.1:{port}") as mds:
        mds.wait_scanned()

        def get(path):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                return answer.read().decode()

        metrics = get("/metrics")
        assert "# TYPE hsfs_mds_requests_total counter" in metrics
        assert 'hsfs_backend_up{backend="d"} 1' in metrics
        body = json.loads(get("/healthz"))
        assert body["ok"]
        assert body["backends"][0]["state"] == "ok"


def test_no_listening_beyond_loopback(volume):
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(volume.state)
    with pytest.raises(HsfsError, match="TLS"):
        ensure_embedded(replace(volume, mds=MdsConfig(listen="0.0.0.0:7420")))
    assert lock_holder(volume.state) is None


def test_paused_server_is_waited_for_not_replaced(volume):
    ensure_embedded(volume)
    pid = lock_holder(volume.state)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises((Busy, HsfsError)):
            ensure_embedded(volume, timeout_s=1.5)
        assert lock_holder(volume.state) == pid
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ensure_embedded(volume)
