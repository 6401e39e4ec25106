"""Cold sequential read of one large file from NFS-Ganesha: hsfs beside our bare NFS client.

The kernel's own client would be the better judge; it is not to be had on every machine, and a
user-space mount of the rivals reads no NFS.
"""

from __future__ import annotations

import os

from bench import raw_nfs, raw_s3
from bench.contest import Turn, hold
from bench.processes import watching
from bench.reading import forget_pages, read_through
from bench.report import Row, row
from bench.servers import nfs_server
from bench.world import HsfsMount, url_backend, workplace

CAP = 400_000_000  # bytes per second
KEY = "big.bin"


def run(*, quick: bool = False) -> list[Row]:
    """Rows of the bench."""
    size = (256 if quick else 1024) << 20
    rounds = 1 if quick else 5
    with workplace(4 * size) as work:
        export = work / "export"
        export.mkdir()
        with (export / KEY).open("wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))
        os.utime(export / KEY, (1e9, 1e9))
        target = work / "target"
        raw_s3.preallocate(target, size)
        with (
            nfs_server(export) as server,
            HsfsMount(work / "hsfs", [url_backend("n", server.url)]) as mount,
        ):
            mount.wait_scanned()
            path = mount.mountpoint / "n" / KEY

            def cold() -> Turn:
                mount.evict(path)
                forget_pages([path])
                with watching(mount=mount.pids, server=server.pids) as watch:
                    if read_through(path) != size:
                        raise RuntimeError("a short read")
                return Turn(size / watch.elapsed_s / 1e9, watch.cpu)

            contenders = {
                "hsfs": cold,
                "bare NFS client": lambda: raw_nfs.run(server.url, KEY, size, target, server.pids),
            }
            pair = [("hsfs", "bare NFS client")]
            with server.capped(CAP):
                capped = hold(contenders, rounds=rounds, against=lambda _: pair)
            free = hold(contenders, rounds=rounds, against=lambda _: pair)
        return [
            row("cold NFS 400 MB/s cap", capped, "bare NFS client", 0.85),
            row("cold NFS uncapped", free, "bare NFS client", 0.5),
        ]
