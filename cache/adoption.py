"""Taking over what an earlier process left in a slot.

A run is *trusted* while every run since it, in this boot, has closed cleanly: its records are then
believed where the cache file is as it was left. After a kill or a power cut nothing is trusted and
each block is proven by its hash before its first use; names and records are made to agree first.
"""

from __future__ import annotations

import ctypes
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path

from hsfs.cache.directory import Slot, key_from_name
from hsfs.cache.index import Frame, Index, Kind, Start, charge_of, start_frame
from hsfs.core.blocks import zero_runs
from hsfs.core.types import BLOCK_SIZE

MAP_SLACK = 16 << 10  # blocks of the file system's own map of a sparse file

_UNKNOWN_BOOT = b""
_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def adopt(index: Index, slot: Slot, stopped: Callable[[], bool]) -> Start | None:
    """Read the log and note the new run in it; afterwards `index.entries` and the slot's files are
    the same set. None when `stopped` before that. Blocking; nothing may be created meanwhile.
    Raises OSError.
    """
    loaded = index.load()
    boot = _boot_id()
    last = loaded.start or Start(0, 0, _UNKNOWN_BOOT)
    noted = slot.last_run()
    run = max(last.run, noted) + 1
    # After a power cut, and only then, a log that ends with CLEAN may have lost what followed.
    kept = loaded.clean and last.run == noted and last.boot == boot != _UNKNOWN_BOOT
    start = Start(run, last.floor if kept and last.floor else run, boot)
    slot.note_run(run)
    index.append([start_frame(start)])
    if not kept and not _sweep(index, slot, stopped):
        return None
    return start


def _sweep(index: Index, slot: Slot, stopped: Callable[[], bool]) -> bool:
    seen = set()
    for path, name in slot.names():
        key = key_from_name(name)
        if key is not None and key in index.entries and _fit(index, slot, key):
            seen.add(key)
        else:
            slot.remove_path(path)
        if stopped():
            return False
    lost = [key for key in index.entries if key not in seen]
    for key in lost:
        index.forget(key)
    index.append([Frame(Kind.DROP, key, 0, b"") for key in lost])
    return True


def _fit(index: Index, slot: Slot, key: bytes) -> bool:
    """Make a cache file as small as its record: blocks written after it would lie on the disk
    uncounted. False when that can't be."""
    found = slot.stat(key)
    charge = charge_of(index.entries[key])
    if not stat.S_ISREG(found.st_mode):
        return False
    if found.st_blocks * 512 <= charge + charge // 8192 + MAP_SLACK:
        return True
    record = index.read(key)
    if record is None:
        return False
    if not record.states:
        return True  # complete: nothing can have been written after it
    try:
        states = zlib.decompress(record.states)
        fd = slot.open(key, os.O_RDWR)
    except (zlib.error, OSError):
        return False
    try:
        os.ftruncate(fd, min(found.st_size, (len(states.rstrip(b"\0"))) * BLOCK_SIZE))
        for first, last in zero_runs(states, 0, len(states)):
            start, length = first * BLOCK_SIZE, (last - first) * BLOCK_SIZE
            if _fallocate(fd, _PUNCH_HOLE, start, length):
                return False
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return _UNKNOWN_BOOT
