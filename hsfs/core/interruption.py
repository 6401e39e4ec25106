"""Ends blocking calls from another thread: the one implementation of `core.ports.Interrupt`."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Interruption:
    """An `Interrupt` of one or of many blocking calls of one thread; set once, from any thread."""

    __slots__ = ("_lock", "_set", "_stop")

    def __init__(self) -> None:
        # Held while the callable runs: after detach() returned it must not run any more.
        self._lock = threading.RLock()
        self._set = False
        self._stop: Callable[[], None] | None = None

    def attach(self, stop: Callable[[], None]) -> None:
        """See `core.ports.Interrupt`."""
        with self._lock:
            self._stop = stop
            if self._set:
                stop()

    def detach(self) -> None:
        """See `core.ports.Interrupt`."""
        with self._lock:
            self._stop = None

    @property
    def interrupted(self) -> bool:
        """Whether `set` was called."""
        return self._set

    def set(self) -> None:
        """Interrupt what runs now and all that is attached later."""
        with self._lock:
            self._set = True
            if self._stop is not None:
                self._stop()
