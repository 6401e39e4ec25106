"""Reusable 1 MiB buffers between a source and the cache file.

Last in, first out: the buffer taken next is the one whose lines are still in the CPU's cache, which
is what makes hashing and copying out of it cheap. Their number bounds the memory of all fills.
"""

from __future__ import annotations

from threading import Lock, Semaphore

from hsfs.core.errors import CacheUnavailable

BUFFER_SIZE = 1 << 20
BUFFERS_MAX = 64
IDLE_MAX = 8
WAIT_S = 10.0


class Buffers:
    """A bounded stack. A fill that finds all in use for 10 s (by sources that hang) gives up."""

    def __init__(self, limit: int = BUFFERS_MAX) -> None:
        self._free: list[memoryview] = []
        self._lock = Lock()
        self._permits = Semaphore(limit)

    def take(self) -> memoryview:
        """A buffer of BUFFER_SIZE with old content. Raises CacheUnavailable."""
        if not self._permits.acquire(timeout=WAIT_S):
            raise CacheUnavailable("cache", "all its fill buffers are in use")
        with self._lock:
            if self._free:
                return self._free.pop()
        return memoryview(bytearray(BUFFER_SIZE))

    def give(self, buffer: memoryview) -> None:
        """Give a taken buffer back; nobody may write to it any more."""
        with self._lock:
            if len(self._free) < IDLE_MAX:
                self._free.append(buffer)
        self._permits.release()

    def clear(self) -> None:
        """Free the idle buffers."""
        with self._lock:
            self._free.clear()
