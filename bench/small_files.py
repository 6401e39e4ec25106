"""10,000 files of 100 KiB in one bucket: stat, open, read, close each; cold and disk-warm."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from bench import rivals
from bench.contest import Contest, Turn, hold, note
from bench.processes import watching
from bench.reading import drop_page_cache, read_small
from bench.report import Row, row
from bench.servers import s3_server
from bench.world import HsfsMount, s3_backend, workplace

BUCKET = "bench"
SIZE = 100 * 1024


def run(*, quick: bool = False, processes: int = 1) -> list[Row]:
    """Rows of the bench."""
    count = 1000 if quick else 10_000
    rounds = 1 if quick else 3
    with workplace(12 * count * SIZE) as work, s3_server(work / "s3") as server:
        source = work / "source"
        names = [f"d{n // 1000:02d}/f{n:05d}.jpg".encode() for n in range(count)]
        for name in names:
            path = source / os.fsdecode(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(SIZE))
        server.create_bucket(BUCKET)
        server.create_bucket(f"{BUCKET}-juicefs")
        server.upload(BUCKET, source)
        competitors = [kind(server, BUCKET, work) for kind in rivals.ALL]
        try:
            for rival in competitors:
                note(f"loading {rival.name}")
                rival.load(source)
                rival.unmount()
            with HsfsMount(work / "hsfs", [s3_backend("b", BUCKET, server.endpoint)]) as mount:
                mount.wait_scanned()
                root = mount.mountpoint / "b"

                def cold() -> Turn:
                    mount.evict()
                    Path("/proc/sys/vm/drop_caches").write_text("2\n")
                    time.sleep(3)  # the journal of thousands of unlinked cache files
                    return measure(root, names, mount.pids, server.pids, processes)

                def warm() -> Turn:
                    drop_page_cache()
                    return measure(root, names, mount.pids, server.pids, processes)

                def best(contest: Contest) -> str:
                    return contest.best([rival.name for rival in competitors])

                contenders: dict[str, Callable[[], Turn]] = {"hsfs": cold}
                for rival in competitors:
                    contenders[rival.name] = _cold(rival, names, server.pids, processes)
                first = hold(contenders, rounds=rounds, against=lambda c: [("hsfs", best(c))])
                read_small(root, names)
                contenders = {"hsfs": warm}
                for rival in competitors:
                    rival.remount()
                    read_small(rival.root, names)
                    contenders[rival.name] = _warm(rival, names, server.pids, processes)
                second = hold(contenders, rounds=rounds, against=lambda c: [("hsfs", best(c))])
            label = f"{count:,} files of 100 KiB"
            return [
                row(f"{label}, cold", first, best(first), 1.0, unit="files/s"),
                row(f"{label}, disk-warm", second, best(second), 1.0, unit="files/s"),
            ]
        finally:
            for rival in competitors:
                rival.unmount()


def measure(
    root: Path, names: list[bytes], mount: list[int], server: list[int], processes: int
) -> Turn:
    """Files per second."""
    with watching(mount=mount, server=server) as watch:
        if read_small(root, names, processes) != len(names) * SIZE:
            raise RuntimeError(f"a short read below {root}")
    return Turn(len(names) / watch.elapsed_s, watch.cpu)


def _cold(
    rival: rivals.Rival, names: list[bytes], server: list[int], processes: int
) -> Callable[[], Turn]:
    def turn() -> Turn:
        rival.remount()
        turn = measure(rival.root, names, rival.pids, server, processes)
        rival.unmount()
        return turn

    return turn


def _warm(
    rival: rivals.Rival, names: list[bytes], server: list[int], processes: int
) -> Callable[[], Turn]:
    def turn() -> Turn:
        drop_page_cache()
        return measure(rival.root, names, rival.pids, server, processes)

    return turn
