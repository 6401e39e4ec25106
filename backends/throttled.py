"""A decorator that keeps a backend within limits: requests/s, bytes/s, requests at once."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import trio

from hsfs.backends.forwarding import ForwardedPages, Forwarding
from hsfs.core.errors import Interrupted
from hsfs.core.ports import Backend, Interrupt
from hsfs.core.types import (
    Capabilities,
    ObjectStat,
    Page,
    Place,
    Space,
    Version,
)

_BURST_S = 0.25  # what may be taken at once after a pause
_POLL_S = 0.2


class Budget:
    """So many units per second, handed out in advance: who takes has to wait for what he is told.

    Thread-safe. A rate of 0 is no limit.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, units: float) -> float:
        """Reserve; gives the seconds to wait first."""
        if self._per_s <= 0:
            return 0.0
        now = self._clock()
        with self._lock:
            start = max(self._free_at, now - _BURST_S)
            self._free_at = start + units / self._per_s
            return max(self._free_at - now - _BURST_S, 0.0)

    def give_back(self, units: float) -> None:
        """Return what was reserved and not used."""
        if self._per_s > 0:
            with self._lock:
                self._free_at -= units / self._per_s


class Throttled(Forwarding):
    """A backend within limits: `rate` requests/s, `bandwidth` bytes/s, `concurrency` requests at
    once; 0 is no limit."""

    def __init__(
        self, inner: Backend, *, rate: float = 0, bandwidth: float = 0, concurrency: int = 0
    ) -> None:
        super().__init__(inner)
        self._requests = Budget(rate)
        self._bytes = Budget(bandwidth)
        self._slots = threading.BoundedSemaphore(concurrency) if concurrency else None
        self._tasks = trio.CapacityLimiter(concurrency) if concurrency else None
        caps = inner.caps
        self._caps = replace(caps, concurrency=concurrency) if concurrency else caps

    @property
    def caps(self) -> Capabilities:
        return self._caps

    async def stat(self, place: Place) -> ObjectStat:
        await self._wait()
        if self._tasks is None:
            return await super().stat(place)
        async with self._tasks:
            return await super().stat(place)

    def read_into(
        self,
        place: Place,
        offset: int,
        buf: memoryview,
        /,
        *,
        expect: Version | None,
        interrupt: Interrupt,
    ) -> int:
        wait_s = max(self._requests.take(1), self._bytes.take(len(buf)))
        if wait_s > 0:
            _sleep(wait_s, interrupt)
        if self._slots is not None:
            while not self._slots.acquire(timeout=_POLL_S):
                if interrupt.interrupted:
                    raise Interrupted("read")
        size = 0
        try:
            size = super().read_into(place, offset, buf, expect=expect, interrupt=interrupt)
        finally:
            if self._slots is not None:
                self._slots.release()
            if size < len(buf):
                self._bytes.give_back(len(buf) - size)
        return size

    async def probe(self) -> Space:
        await self._wait()
        return await super().probe()

    def _listing(
        self, operation: str, place: Place, pages: AsyncIterator[Page]
    ) -> AsyncIterator[Page]:
        return _PacedPages(self._requests, pages)

    async def _wait(self) -> None:
        wait_s = self._requests.take(1)
        if wait_s > 0:
            await trio.sleep(wait_s)


class _PacedPages(ForwardedPages):
    """Each page costs one request; one page ahead may be in flight below."""

    def __init__(self, requests: Budget, pages: AsyncIterator[Page]) -> None:
        super().__init__(pages)
        self._requests = requests

    async def __anext__(self) -> Page:
        wait_s = self._requests.take(1)
        if wait_s > 0:
            await trio.sleep(wait_s)
        return await super().__anext__()


def _sleep(seconds: float, interrupt: Interrupt) -> None:
    woken = threading.Event()
    interrupt.attach(woken.set)
    try:
        woken.wait(seconds)
    finally:
        interrupt.detach()
    if interrupt.interrupted:
        raise Interrupted("read")
