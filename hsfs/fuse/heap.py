"""The allocator's settings for a process that answers reads of 1 MiB.

A reply buffer above malloc's mmap threshold is mapped, faulted in page by page, zeroed and unmapped
for every read: half as much CPU again as the read itself. Held in the heap it is reused. libfuse's
receive buffers (1 MiB and a page, of which a read-only mount touches one page) must stay mapped by
themselves: cut from the heap they would keep whole megabytes of it in use each. The threshold lies
between the two. What a burst leaves behind is given back once the mount is idle.
"""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_BYTES = (1 << 20) + 2048
_TRIM_BYTES = 32 << 20


def keep_reply_buffers() -> None:
    """Serve blocks of up to 1 MiB from the heap. Does nothing where libc is not glibc."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
    except (OSError, AttributeError) as error:
        log.debug("malloc keeps its settings: %s", error)


def give_back() -> None:
    """Blocking, GIL released: return free memory to the system."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError) as error:
        log.debug("memory is not trimmed: %s", error)
