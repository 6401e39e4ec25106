"""Taking over what an earlier process left in a slot.

A run is *trusted* while every run since it, in this boot, has closed cleanly: its records are then
believed where the cache file is as it was left. After a kill or a power cut nothing is trusted and
each block is proven by its hash before its first use; names and records are made to agree first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hsfs.cache.directory import Slot, key_from_name
from hsfs.cache.index import Frame, Index, Kind, Start, start_frame

_UNKNOWN_BOOT = b""


def adopt(index: Index, slot: Slot, stopped: Callable[[], bool]) -> Start | None:
    """Read the log and note the new run in it; afterwards `index.entries` and the slot's files are
    the same set. None when `stopped` before that. Blocking; nothing may be created meanwhile.
    Raises OSError.
    """
    loaded = index.load()
    boot = _boot_id()
    last = loaded.start or Start(0, 0, _UNKNOWN_BOOT)
    run = last.run + 1
    kept = loaded.clean and last.floor and last.boot == boot != _UNKNOWN_BOOT
    start = Start(run, last.floor if kept else run, boot)
    index.append([start_frame(start)])
    if not loaded.clean and not _sweep(index, slot, stopped):
        return None
    return start


def _sweep(index: Index, slot: Slot, stopped: Callable[[], bool]) -> bool:
    seen = set()
    for path, name in slot.names():
        key = key_from_name(name)
        if key is not None and key in index.entries:
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


def _boot_id() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return _UNKNOWN_BOOT
