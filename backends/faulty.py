"""A decorator for tests that makes faults by a script: errors, delays, short and wrong reads."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import trio

from hsfs.backends.forwarding import ForwardedPages, Forwarding
from hsfs.core.errors import HsfsError
from hsfs.core.ports import Backend, Interrupt
from hsfs.core.types import (
    ObjectStat,
    Page,
    Place,
    Space,
    Version,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one call. `before` errors leave the source unasked; `keep` is the number of
    bytes that a read still brings; `flip` inverts the byte at that offset of the buffer."""

    error: HsfsError | None = None
    delay_s: float = 0.0
    keep: int | None = None
    flip: int | None = None


Script = Callable[[str, Place, int], Fault | None]


class Faulty(Forwarding):
    """Asks `script(operation, place, number)` before each call, where operation is "stat", "read",
    "scan" (each page), "list_flat" (each page) or "probe", and number counts the calls of that
    operation from 0."""

    def __init__(self, inner: Backend, script: Script) -> None:
        super().__init__(inner)
        self.script = script
        self._lock = threading.Lock()
        self._calls: dict[str, int] = {}

    def calls(self, operation: str) -> int:
        """How often an operation was asked for."""
        with self._lock:
            return self._calls.get(operation, 0)

    async def stat(self, place: Place) -> ObjectStat:
        await self.trouble("stat", place)
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
        fault = self._next("read", place)
        if fault is None:
            return super().read_into(place, offset, buf, expect=expect, interrupt=interrupt)
        if fault.delay_s:
            woken = threading.Event()
            interrupt.attach(woken.set)
            woken.wait(fault.delay_s)
            interrupt.detach()
        size = 0
        if fault.error is None or fault.keep:
            part = buf if fault.keep is None else buf[: fault.keep]
            size = super().read_into(place, offset, part, expect=expect, interrupt=interrupt)
        if fault.error is not None:
            raise fault.error
        if fault.flip is not None and fault.flip < size:
            buf[fault.flip] ^= 0xFF
        return size

    async def probe(self) -> Space:
        await self.trouble("probe", Place(b""))
        return await super().probe()

    async def trouble(self, operation: str, place: Place) -> None:
        """Make the scripted fault of one asynchronous call."""
        fault = self._next(operation, place)
        if fault is not None:
            if fault.delay_s:
                await trio.sleep(fault.delay_s)
            if fault.error is not None:
                raise fault.error

    def _next(self, operation: str, place: Place) -> Fault | None:
        with self._lock:
            number = self._calls.get(operation, 0)
            self._calls[operation] = number + 1
        return self.script(operation, place, number)

    def _listing(
        self, operation: str, place: Place, pages: AsyncIterator[Page]
    ) -> AsyncIterator[Page]:
        return _FaultyPages(self, operation, place, pages)


class _FaultyPages(ForwardedPages):
    def __init__(
        self, faults: Faulty, operation: str, place: Place, pages: AsyncIterator[Page]
    ) -> None:
        super().__init__(pages)
        self._faults = faults
        self._operation = operation
        self._place = place

    async def __anext__(self) -> Page:
        await self._faults.trouble(self._operation, self._place)
        return await super().__anext__()
