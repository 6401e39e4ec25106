"""CPU seconds of process trees, read from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """The process and all that it started and that still live."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                todo += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def cpu_s(pids: list[int]) -> float:
    """User and system seconds of the processes and of their reaped children."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(fields[i]) for i in (11, 12, 13, 14))
    return total / _TICKS


def rss_bytes(pid: int) -> int:
    """Resident bytes of one process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Stopwatch:
    """Elapsed seconds and CPU seconds by kind of process."""

    elapsed_s = 0.0
    cpu: dict[str, float]


@contextmanager
def watching(**kinds: list[int]) -> Iterator[Stopwatch]:
    """Time the block; `kinds` maps a kind's name to its pids (this process: `client`)."""
    watch = Stopwatch()
    watch.cpu = {}
    mine = os.times()
    before = {kind: cpu_s(pids) for kind, pids in kinds.items()}
    start = time.perf_counter()
    yield watch
    watch.elapsed_s = time.perf_counter() - start
    now = os.times()
    watch.cpu["client"] = sum(now[:4]) - sum(mine[:4])
    for kind, pids in kinds.items():
        watch.cpu[kind] = cpu_s(pids) - before[kind]
