"""What a long-lived process asks of the kernel and of malloc: each a wish, refusals are notes."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

import trio

_PR_SET_IO_FLUSHER = 57
_M_ARENA_MAX = -8
_OOM_SCORE = -500
_TRIM_EVERY_S = 5.0
_TRIM_STEP = 8 * 1024**2
_FDS_BESIDE_CACHE = 128  # sockets, /dev/fuse, the loop's own
_FDS_MAX = 65536
_CACHE_FDS_MIN = 32
_CACHE_FDS_MAX = 8192

_libc = ctypes.CDLL(None, use_errno=True)


def raise_fd_limit() -> int:
    """Lift the soft limit of open files to the hard one (at most 65536 more are of no use); the
    limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FDS_MAX if hard == resource.RLIM_INFINITY else min(hard, _FDS_MAX)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):
            return soft
        return most
    return most if soft == resource.RLIM_INFINITY else soft


def cache_fds(limit: int, wanted: int | None) -> int:
    """Cache files that may be open at a time: of `wanted`, else of 80% of the limit, what the rest
    of the process leaves."""
    budget = min(wanted or limit * 8 // 10, limit)
    beside = min(_FDS_BESIDE_CACHE, budget // 2)
    return max(_CACHE_FDS_MIN, min(_CACHE_FDS_MAX, budget - beside))


def tune_malloc() -> None:
    """One arena: only the main one's top goes back to the kernel by malloc_trim (glibc's mtrim
    skips the top of the others: 17 MiB of one were seen to stay). The session sets thresholds."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)


def protect() -> list[str]:
    """Be a late victim of the OOM killer, and let the kernel reclaim through us; the refusals."""
    notes = []
    try:
        path = Path("/proc/self/oom_score_adj")
        if int(path.read_text()) > _OOM_SCORE:
            path.write_text(str(_OOM_SCORE))
    except OSError as e:
        notes.append(f"oom_score_adj stays as it is: {e.strerror}")
    if _libc.prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0) != 0:
        notes.append(f"PR_SET_IO_FLUSHER refused: {os.strerror(ctypes.get_errno())}")
    return notes


def resident_bytes() -> int:
    """This process's resident memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def keep_trimmed() -> None:
    """Give freed memory back after bursts; for ever. glibc keeps free chunks below a live one."""
    if not hasattr(_libc, "malloc_trim"):
        return
    low = resident_bytes()
    while True:
        await trio.sleep(_TRIM_EVERY_S)
        now = resident_bytes()
        if now > low + _TRIM_STEP:
            await trio.to_thread.run_sync(_libc.malloc_trim, 0)
            low = resident_bytes()
        else:
            low = min(low, now)
