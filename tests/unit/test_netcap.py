"""The capped network: what runs in it is reached from here, slowly, and it goes without a trace."""

import os
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.servers.netcap import CappedNet
from tests.servers.process import Process

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

SIZE = 4 << 20


def fetch(url):
    with urllib.request.urlopen(url, timeout=60) as reply:
        return reply.read()


def test_caps_what_the_server_sends_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(SIZE))
    with CappedNet(10e6, burst=256 << 10) as net:
        server = Process(
            [*net.enter, sys.executable, "-I", "-m", "http.server", "-b", net.address, "8000"],
            log=tmp_path / "log",
            cwd=tmp_path,
        )
        url = f"http://{net.address}:8000/file"

        def answers():
            try:
                fetch(f"http://{net.address}:8000/log")
            except urllib.error.URLError:
                return False
            return True

        server.wait_until(answers, what="http.server")
        before = net.sent_bytes()
        start = time.monotonic()
        assert fetch(url) == (tmp_path / "file").read_bytes()
        # A lower bound only: at 10 MB/s it is 0.4 s.
        assert time.monotonic() - start > 0.3
        assert SIZE < net.sent_bytes() - before < SIZE * 1.5
        net.set_rate(0)
        fetch(url)
        server.stop(signal.SIGKILL)
        pid = int(net.enter[1].split("/")[2])
    assert not Path("/proc", str(pid)).exists()
    assert net.client_address not in Path("/proc/net/fib_trie").read_text()
    assert not net.folder.exists()
