"""A decorator that counts: requests, bytes, errors and latencies of one backend, for stats."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

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

# Upper bounds (s) of the latency classes; a last one takes the rest.
LATENCY_BOUNDS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class BackendCounters:
    """What one backend was asked since it was opened. Times in seconds, sizes in bytes."""

    reads: int
    read_bytes: int
    read_s: float
    read_latency: tuple[int, ...]  # reads per class of LATENCY_BOUNDS_S
    stats: int
    pages: int
    entries: int
    in_flight: int  # reads
    errors: Mapping[str, int]  # by the error's code


class Metered(Forwarding):
    """Counts and forwards. `counters()` may be called from any thread."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._reads = 0
        self._read_bytes = 0
        self._read_s = 0.0
        self._latency = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._stats = 0
        self._pages = 0
        self._entries = 0
        self._in_flight = 0
        self._errors: dict[str, int] = {}

    def counters(self) -> BackendCounters:
        """A consistent snapshot."""
        with self._lock:
            return BackendCounters(
                reads=self._reads,
                read_bytes=self._read_bytes,
                read_s=self._read_s,
                read_latency=tuple(self._latency),
                stats=self._stats,
                pages=self._pages,
                entries=self._entries,
                in_flight=self._in_flight,
                errors=dict(self._errors),
            )

    async def stat(self, place: Place) -> ObjectStat:
        with self._lock:
            self._stats += 1
        try:
            return await super().stat(place)
        except HsfsError as error:
            self._count(error)
            raise

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
        start = time.perf_counter()
        with self._lock:
            self._in_flight += 1
        size = 0
        try:
            size = super().read_into(place, offset, buf, expect=expect, interrupt=interrupt)
        except HsfsError as error:
            self._count(error)
            raise
        finally:
            took_s = time.perf_counter() - start
            # Few classes: counting up costs less than a search.
            index = 0
            for bound in LATENCY_BOUNDS_S:
                if took_s <= bound:
                    break
                index += 1
            with self._lock:
                self._in_flight -= 1
                self._reads += 1
                self._read_bytes += size
                self._read_s += took_s
                self._latency[index] += 1
        return size

    async def probe(self) -> Space:
        try:
            return await super().probe()
        except HsfsError as error:
            self._count(error)
            raise

    def _listing(
        self, operation: str, place: Place, pages: AsyncIterator[Page]
    ) -> AsyncIterator[Page]:
        return _CountedPages(self, pages)

    def _count(self, error: HsfsError) -> None:
        with self._lock:
            self._errors[error.code] = self._errors.get(error.code, 0) + 1

    def count_page(self, page: Page) -> None:
        """One page of a listing went by."""
        with self._lock:
            self._pages += 1
            self._entries += len(page.entries)

    def count_error(self, error: HsfsError) -> None:
        """A listing failed."""
        self._count(error)


class _CountedPages(ForwardedPages):
    def __init__(self, meter: Metered, pages: AsyncIterator[Page]) -> None:
        super().__init__(pages)
        self._meter = meter

    async def __anext__(self) -> Page:
        try:
            page = await super().__anext__()
        except HsfsError as error:
            self._meter.count_error(error)
            raise
        self._meter.count_page(page)
        return page


def counters_of(backend: Backend) -> BackendCounters | None:
    """The counters of a backend under whatever decorators, None if it is not metered."""
    layer: object = backend
    while layer is not None:
        if isinstance(layer, Metered):
            return layer.counters()
        layer = getattr(layer, "inner", None)
    return None
