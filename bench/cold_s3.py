"""Cold sequential read of one large object from S3: hsfs beside raw clients and mounted rivals.

Raw clients fetch 8 MiB ranges, 8 in flight (curl: 4 x a quarter), into a preallocated file. hsfs
and the rivals have nothing cached. Once with the server capped at 400 MB/s outside all processes
(tbf on the server's link), once uncapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bench import raw_s3, rivals
from bench.contest import Contest, Turn, hold, note
from bench.processes import watching
from bench.reading import forget_pages, read_through
from bench.report import Row, row
from bench.servers import s3_server
from bench.world import HsfsMount, s3_backend, workplace

CAP = 400_000_000  # bytes per second
BUCKET = "bench"
KEY = "big.bin"


def run(*, quick: bool = False) -> list[Row]:
    """Rows of the bench."""
    size = (256 if quick else 1024) << 20
    with workplace(12 * size) as work, s3_server(work / "s3") as server:
        source = work / "source"
        source.mkdir()
        with (source / KEY).open("wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))
        server.create_bucket(BUCKET)
        server.upload(BUCKET, source)
        target = work / "target"
        raw_s3.preallocate(target, size)
        competitors = []
        for kind in rivals.ALL:
            note(f"loading {kind.name}")
            server.create_bucket(f"{BUCKET}-juicefs")
            rival = kind(server, BUCKET, work)
            rival.load(source)
            competitors.append(rival)
        rows: list[Row] = []
        try:
            with HsfsMount(work / "hsfs", [s3_backend("b", BUCKET, server.endpoint)]) as mount:
                mount.wait_scanned()
                path = mount.mountpoint / "b" / KEY

                def cold() -> Turn:
                    mount.evict(path)
                    forget_pages([path])
                    with watching(mount=mount.pids, server=server.pids) as watch:
                        if read_through(path) != size:
                            raise RuntimeError("a short read")
                    return Turn(size / watch.elapsed_s / 1e9, watch.cpu)

                def raw(kind: str) -> Callable[[], Turn]:
                    return lambda: raw_s3.run(
                        kind, server.endpoint, BUCKET, KEY, size, target, server.pids
                    )

                contenders: dict[str, Callable[[], Turn]] = {"hsfs": cold}
                contenders |= {kind: raw(kind) for kind in raw_s3.KINDS}
                contenders |= {one.name: _rival(one, size, server.pids) for one in competitors}
                rounds = 1 if quick else 5

                def pairs(contest: Contest) -> list[tuple[str, str]]:
                    return [("hsfs", contest.best(list(raw_s3.KINDS)))]

                with server.capped(CAP):
                    capped = hold(contenders, rounds=rounds, against=pairs)
                free = hold(contenders, rounds=rounds, against=pairs)
            for label, contest, bar in (("400 MB/s cap", capped, 0.85), ("uncapped", free, 0.7)):
                best = contest.best(list(raw_s3.KINDS))
                rows.append(row(f"cold S3 {label}", contest, best, bar))
                rows += [row(f"cold S3 {label}", contest, one.name, 1.0) for one in competitors]
        finally:
            for one in competitors:
                one.unmount()
        return rows


def _rival(rival: rivals.Rival, size: int, server: list[int]) -> Callable[[], Turn]:
    def turn() -> Turn:
        rival.remount()
        path: Path = rival.root / KEY
        os.stat(path)
        with watching(mount=rival.pids, server=server) as watch:
            if read_through(path) != size:
                raise RuntimeError(f"{rival.name}: a short read")
        result = Turn(size / watch.elapsed_s / 1e9, watch.cpu)
        rival.unmount()
        return result

    return turn
