"""Time as a collaborator: wall time is stored and shown, the monotonic clock measures durations."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from; tests pass one that they move by hand."""

    def time_ns(self) -> int:
        """Wall clock, nanoseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps."""


class SystemClock:
    """The clocks of this machine."""

    __slots__ = ()

    def time_ns(self) -> int:
        """Wall clock, nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps."""
        return time.monotonic()
