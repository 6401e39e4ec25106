"""Our bare NFS client: `read_into` of 4 MiB in threads into a preallocated file, a process a run.

`python -m bench.raw_nfs URL KEY SIZE TARGET` prints elapsed and CPU seconds, start-up excluded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import trio

from bench.contest import Turn
from bench.processes import watching
from hsfs.backends.registry import open_backend
from hsfs.core.types import CHUNK_SIZE, DeviceId, Place

IN_FLIGHT = 8


class Never:
    """An Interrupt that nobody sets."""

    interrupted = False

    def attach(self, stop: Callable[[], None]) -> None:
        """Nothing to stop."""

    def detach(self) -> None:
        """Nothing attached."""


async def _main(url: str, key: bytes, size: int, target: str) -> None:
    backend = await open_backend(DeviceId(1), url, {"connections": IN_FLIGHT})
    stat = await backend.stat(Place(key))
    fd = os.open(target, os.O_WRONLY)
    local = threading.local()

    def fetch(offset: int) -> None:
        if not hasattr(local, "buf"):
            local.buf = memoryview(bytearray(CHUNK_SIZE))
        view = local.buf[: min(CHUNK_SIZE, size - offset)]
        got = backend.read_into(stat.place, offset, view, expect=None, interrupt=Never())
        if got != len(view):
            raise RuntimeError("a short read")
        os.pwrite(fd, view, offset)

    def all_of_it() -> None:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(fetch, range(0, size, CHUNK_SIZE)))

    before, start = os.times(), time.perf_counter()
    await trio.to_thread.run_sync(all_of_it)
    after = os.times()
    print(time.perf_counter() - start, sum(after[:2]) - sum(before[:2]))
    await backend.aclose()


def run(url: str, key: str, size: int, target: Path, server: list[int]) -> Turn:
    """One turn; GB/s."""
    command = [sys.executable, "-m", "bench.raw_nfs", url, key, str(size), str(target)]
    with watching(server=server) as watch:
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
    elapsed, cpu = (float(word) for word in answer.stdout.split())
    return Turn(size / elapsed / 1e9, {"client": cpu, "server": watch.cpu["server"]})


if __name__ == "__main__":
    trio.run(_main, sys.argv[1], os.fsencode(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
