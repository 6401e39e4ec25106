"""Assimilation of 100,000 keys: keys/s of a full scan beside our lister alone, on one server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import trio

from bench.contest import Turn, hold, note
from bench.processes import cpu_s, tree, watching
from bench.report import Row, row
from bench.servers import S3, s3_server
from bench.world import CREDENTIALS, HsfsMount, hsfs, s3_backend, workplace
from hsfs.backends.registry import open_backend
from hsfs.core.types import DeviceId, Place

BUCKET = "bench"


def run(*, quick: bool = False) -> list[Row]:
    """Rows of the bench: the rate, and the bytes that the metadata server keeps per inode."""
    count = 10_000 if quick else 100_000
    rounds = 2 if quick else 5
    with workplace(2 << 30) as work, s3_server(work / "s3") as server:
        server.create_bucket(BUCKET)
        note(f"putting {count:,} keys")
        server.server.put_many(
            BUCKET, ((f"set{n // 1000:03d}/img{n:06d}.jpg", b"x") for n in range(count))
        )
        per_inode: list[float] = []

        def listed() -> Turn:
            with watching(server=server.pids) as watch:
                done = subprocess.run(
                    [sys.executable, "-m", "bench.assimilation", server.endpoint],
                    check=True,
                    capture_output=True,
                    text=True,
                    env={**os.environ, **CREDENTIALS},
                )
            keys, elapsed, cpu = (float(word) for word in done.stdout.split())
            if keys != count:
                raise RuntimeError(f"the lister found {keys} of {count} keys")
            return Turn(keys / elapsed, {"client": cpu, "server": watch.cpu["server"]})

        def assimilated() -> Turn:
            folder = work / f"hsfs{len(per_inode)}"
            return _assimilate(folder, server, count, per_inode)

        contest = hold(
            {"hsfs": assimilated, "our lister": listed},
            rounds=rounds,
            against=lambda _: [("hsfs", "our lister")],
        )
    size = sorted(per_inode)[len(per_inode) // 2]
    return [
        row(f"assimilation of {count:,} keys", contest, "our lister", 0.5, unit="keys/s"),
        Row("metadata bytes per inode", size, 1, size, 500, "B", "1 B", lower=True),
    ]


def _assimilate(work: Path, server: S3, count: int, per_inode: list[float]) -> Turn:
    """A fresh volume; timed from the start of the scan to its end."""
    mount = HsfsMount(work, [s3_backend("b", BUCKET, server.endpoint, scan="lazy")])
    with mount:
        daemons = [pid for one in mount.mds_pids() for pid in tree(one)]
        before, start = cpu_s(daemons), time.perf_counter()
        hsfs("assimilate", str(mount.volume), "b")
        elapsed = time.perf_counter() - start
        cpu = cpu_s(daemons) - before
        # du: the map is a sparse file.
        used = subprocess.run(
            ["du", "-s", "-B1", str(work / "state")], check=True, capture_output=True, text=True
        )
        per_inode.append(int(used.stdout.split()[0]) / count)
    return Turn(count / elapsed, {"mds and mover": cpu})


async def _list(endpoint: str) -> None:
    backend = await open_backend(
        DeviceId(1), f"s3://{BUCKET}", {"endpoint": endpoint, "region": "us-east-1"}
    )
    before, start, keys = os.times(), time.perf_counter(), 0
    async for page in backend.list_flat(Place(b"")):  # type: ignore[attr-defined]
        keys += len(page.entries)
    after = os.times()
    print(keys, time.perf_counter() - start, sum(after[:2]) - sum(before[:2]))
    await backend.aclose()


if __name__ == "__main__":
    trio.run(_list, sys.argv[1])
