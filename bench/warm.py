"""Warm sequential reads: disk-warm (in Tier 0, page cache dropped) and page-warm.

Beside the bare cache file, and beside the rivals with their caches filled by one read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bench import raw_s3, rivals
from bench.contest import Contest, Turn, hold, note
from bench.processes import watching
from bench.reading import drop_page_cache, read_through
from bench.report import Row, row
from bench.servers import s3_server
from bench.world import HsfsMount, s3_backend, workplace

BUCKET = "bench"
KEY = "big.bin"


def run(*, quick: bool = False) -> list[Row]:
    """Rows of the bench."""
    size = (256 if quick else 1024) << 20
    rounds = 2 if quick else 5
    with workplace(12 * size) as work, s3_server(work / "s3") as server:
        source = work / "source"
        source.mkdir()
        raw_s3.preallocate(source / KEY, size)
        with (source / KEY).open("r+b") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))
        server.create_bucket(BUCKET)
        server.create_bucket(f"{BUCKET}-juicefs")
        server.upload(BUCKET, source)
        competitors = [kind(server, BUCKET, work) for kind in rivals.ALL]
        try:
            for rival in competitors:
                note(f"filling the cache of {rival.name}")
                rival.load(source)
                rival.remount()
                read_through(rival.root / KEY)
            with HsfsMount(work / "hsfs", [s3_backend("b", BUCKET, server.endpoint)]) as mount:
                mount.wait_scanned()
                path = mount.mountpoint / "b" / KEY
                read_through(path)
                bare = largest(mount.cache)
                disk = {
                    "hsfs": _turn(path, size, mount.pids, dropped=True),
                    "bare file": _turn(bare, size, [], dropped=True),
                }
                disk |= {
                    rival.name: _turn(rival.root / KEY, size, rival.pids, dropped=True)
                    for rival in competitors
                }

                def best(contest: Contest) -> str:
                    return contest.best([rival.name for rival in competitors])

                cold = hold(
                    disk,
                    rounds=rounds,
                    against=lambda c: [("hsfs", "bare file"), ("hsfs", best(c))],
                )
                rows = [
                    row("disk-warm sequential", cold, "bare file", 0.45),
                    row("disk-warm sequential", cold, best(cold), 1.0),
                ]
                drop_page_cache()
                read_through(path)
                read_through(bare)
                before = reads(mount)
                pages = hold(
                    {
                        "hsfs": _turn(path, size, mount.pids, dropped=False),
                        "bare file": _turn(bare, size, [], dropped=False),
                    },
                    rounds=3 * rounds,
                    against=lambda _: [("hsfs", "bare file")],
                )
                arrived = reads(mount) - before
            rows.append(row("page-warm sequential", pages, "bare file", 0.4))
            rows.append(
                Row(
                    "READs at the daemon, page-warm", arrived, 0, arrived, 0, "requests", lower=True
                )
            )
            return rows
        finally:
            for rival in competitors:
                rival.unmount()


def reads(mount: HsfsMount) -> int:
    """READ requests that the daemon has seen."""
    front = mount.stats()["front"]
    assert isinstance(front, dict)
    return int(front["reads"])


def largest(folder: Path) -> Path:
    """The largest file below a folder: the cache file of the one large object."""
    return max(
        (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".mdb")),
        key=lambda path: path.stat().st_blocks,
    )


def _turn(path: Path, size: int, pids: list[int], *, dropped: bool) -> Callable[[], Turn]:
    def turn() -> Turn:
        if dropped:
            drop_page_cache()
        with watching(mount=pids) as watch:
            if read_through(path) != size:
                raise RuntimeError(f"a short read of {path}")
        return Turn(size / watch.elapsed_s / 1e9, watch.cpu)

    return turn
