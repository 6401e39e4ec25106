"""Reusable 1 MiB buffers between a source and the cache file.

Last in, first out: the buffer taken next is the one whose lines are still in the CPU's cache, which
is what makes hashing and copying out of it cheap. Their number bounds the memory of all fills. Each
is a mapping of its own, so that those which were idle for a while really go back to the system.
"""

from __future__ import annotations

import mmap
import time
from threading import Lock, Semaphore

from hsfs.core.errors import CacheUnavailable

BUFFER_SIZE = 1 << 20
BUFFERS_MAX = 64
IDLE_MAX = 8
IDLE_S = 5.0
WAIT_S = 10.0


class Buffers:
    """A bounded stack. A fill that finds all in use for 10 s (by sources that hang) gives up."""

    def __init__(self, limit: int = BUFFERS_MAX) -> None:
        self._free: list[memoryview] = []
        self._lock = Lock()
        self._permits = Semaphore(limit)
        self._given_s = 0.0

    def take(self) -> memoryview:
        """A buffer of BUFFER_SIZE with old content. Raises CacheUnavailable."""
        if not self._permits.acquire(timeout=WAIT_S):
            raise CacheUnavailable("cache", "all its fill buffers are in use")
        with self._lock:
            if self._free:
                return self._free.pop()
        return memoryview(mmap.mmap(-1, BUFFER_SIZE))

    def give(self, buffer: memoryview) -> None:
        """Give a taken buffer back; nobody may write to it any more."""
        with self._lock:
            self._given_s = time.monotonic()
            if len(self._free) < IDLE_MAX:
                self._free.append(buffer)
        self._permits.release()

    def tidy(self) -> None:
        """Free the idle buffers when no fill ended in the last IDLE_S seconds."""
        if self._free and time.monotonic() - self._given_s > IDLE_S:
            self.clear()

    def clear(self) -> None:
        """Free the idle buffers."""
        with self._lock:
            self._free.clear()
