"""kill -9 of the processes behind a mount while files are read, then the same state again: every
byte is right, nothing is left in the way."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.hsfs_command import Sandbox, end, eventually
from tests.servers.process import children

READ = """
import hashlib, os, sys
for name in sorted(os.listdir(sys.argv[1])):
    try:
        with open(os.path.join(sys.argv[1], name), "rb") as file:
            print(name, hashlib.file_digest(file, "sha256").hexdigest(), flush=True)
    except OSError as e:
        print(name, f"errno={e.errno}", flush=True)
"""


def start_reading(mountpoint):
    return subprocess.Popen(
        [sys.executable, "-c", READ, str(mountpoint)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def wrong(lines, want):
    """Files whose bytes came and are not the source's; errors are no wrong bytes."""
    got = dict(line.split() for line in lines.splitlines())
    return {n: d for n, d in got.items() if not d.startswith("errno=") and d != want[n]}


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_a_random_moment(seed):
    moments = random.Random(seed)
    with Sandbox() as box:
        want = {}
        for number in range(40):
            data = moments.randbytes(moments.choice((10, 1000, 100_000, 3_000_000)))
            box.put(f"{number:02}", data)
            want[f"{number:02}"] = hashlib.sha256(data).hexdigest()
        volume, mnt = box.volume(), box.mountpoint()
        box.mount(volume, mnt)
        for victim in ("mount", "mds", "mover", "mount"):
            mds = int((box.state / "mds.pid").read_text())
            with start_reading(mnt) as reader:
                time.sleep(moments.uniform(0.0, 0.4))  # a random moment, not a wait for something
                if victim == "mount":
                    end(box.status(mnt)["pid"], signal.SIGKILL)
                elif victim == "mds":
                    end(mds, signal.SIGKILL)
                else:
                    for child in children(mds):
                        end(child, signal.SIGKILL)
                lines, _ = reader.communicate(timeout=120)
            assert wrong(lines, want) == {}, victim
            if victim == "mount":
                box.run("umount", mnt, "--force", check=0)
                box.mount(volume, mnt)

            def all_right():
                with start_reading(mnt) as again:
                    lines, _ = again.communicate(timeout=120)
                assert wrong(lines, want) == {}
                return dict(line.split() for line in lines.splitlines()) == want

            assert eventually(all_right, 90), f"after kill -9 of {victim}\n{box.logs()}"
        box.run("umount", mnt, check=0)


def test_a_cache_that_goes_and_comes_back():
    """The cache directory removed under the mount: reads go on, status says so."""
    with Sandbox() as box:
        data = os.urandom(2_000_000)
        box.put("a", data)
        box.put("b", data[::-1])
        volume, mnt = box.volume(), box.mountpoint()
        box.mount(volume, mnt)
        assert Path(mnt / "a").read_bytes() == data
        (box.state / "cache").rename(box.root / "gone")
        assert Path(mnt / "b").read_bytes() == data[::-1]
        assert Path(mnt / "a").read_bytes() == data
        (box.root / "gone").rename(box.state / "cache")

        def well():
            assert Path(mnt / "b").read_bytes() == data[::-1]
            return box.status(mnt)["cache_trouble"] == ""

        assert eventually(well, 60), box.status(mnt)
        box.run("umount", mnt, check=0)
