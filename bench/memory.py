"""Memory of the mount: 64 random readers over 1,000 files beside a `find` over 200,000 names."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

from bench.contest import note
from bench.processes import rss_bytes
from bench.report import Row
from bench.servers import s3_server
from bench.world import HsfsMount, s3_backend, url_backend, workplace

BUCKET = "bench"
LIMIT = 512 << 20

_READER = """
import os, random, sys, time
seed, root, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
pick = random.Random(seed)
end = time.monotonic() + seconds
while time.monotonic() < end:
    fd = os.open(f"{root}/f{pick.randrange(1000):04d}", os.O_RDONLY)
    size = os.fstat(fd).st_size
    for _ in range(8):
        os.pread(fd, 65536, pick.randrange(size))
    os.close(fd)
"""


def run(*, quick: bool = False) -> list[Row]:
    """Rows of the bench."""
    names = 10_000 if quick else 200_000
    seconds = 10 if quick else 60
    rest = 45 if quick else 75
    with workplace(8 << 30) as work, s3_server(work / "s3") as server:
        server.create_bucket(BUCKET)
        note("putting 1,000 files of 1 MiB")
        body = random.Random(1).randbytes(1 << 20)
        server.server.put_many(BUCKET, ((f"f{n:04d}", body) for n in range(1000)))
        note(f"making {names:,} names")
        many = work / "many"
        for n in range(names // 1000):
            folder = many / f"d{n:03d}"
            folder.mkdir(parents=True)
            for m in range(1000):
                (folder / f"name{m:04d}").touch()
        backends = [
            s3_backend("b", BUCKET, server.endpoint),
            url_backend("many", f"file://{many}"),
        ]
        with HsfsMount(work / "hsfs", backends) as mount:
            mount.wait_scanned(1200)
            find = ["find", str(mount.mountpoint / "many"), "-type", "f", "-size", "+1"]
            small = ["find", str(mount.mountpoint / "b"), "-maxdepth", "0"]
            subprocess.run(small, check=True, stdout=subprocess.DEVNULL)
            idle = rss_bytes(mount.pid)
            peak, stop = [idle], threading.Event()

            def watch() -> None:
                while not stop.wait(0.1):
                    peak.append(rss_bytes(mount.pid))

            watcher = threading.Thread(target=watch)
            watcher.start()
            readers = [
                subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-S",
                        "-c",
                        _READER,
                        str(seed),
                        str(mount.mountpoint / "b"),
                        str(seconds),
                    ]
                )
                for seed in range(64)
            ]
            subprocess.run(find, check=True, stdout=subprocess.DEVNULL)
            if any(reader.wait() for reader in readers):
                raise RuntimeError("a reader failed")
            # Names known to the kernel are forgotten under memory pressure; this is that.
            Path("/proc/sys/vm/drop_caches").write_text("2\n")
            note(f"resting {rest} s")
            time.sleep(rest)
            stop.set()
            watcher.join()
            after = rss_bytes(mount.pid)
    top = max(peak)
    mib = 1 << 20
    return [
        Row(
            "mount RSS, 64 random readers and a find",
            top / mib,
            LIMIT / mib,
            top / LIMIT,
            1.0,
            "MiB",
            "memory_limit",
            lower=True,
        ),
        Row(
            f"mount RSS {rest} s later",
            after / mib,
            idle / mib,
            after / idle,
            1.2,
            "MiB",
            "idle before",
            lower=True,
        ),
    ]
