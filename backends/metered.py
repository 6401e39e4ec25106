"""A decorator that counts: requests, bytes, errors and latencies of one backend, for stats."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final, cast

from hsfs.core.errors import HsfsError
from hsfs.core.ports import Announcer, Backend, FlatLister, Interrupt
from hsfs.core.types import (
    Capabilities,
    Cursor,
    DeviceId,
    Extent,
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


class Metered:
    """Counts and forwards. `counters()` may be called from any thread."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
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

    @property
    def device(self) -> DeviceId:
        return self.inner.device

    @property
    def caps(self) -> Capabilities:
        return self.inner.caps

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
            return await self.inner.stat(place)
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
            size = self.inner.read_into(place, offset, buf, expect=expect, interrupt=interrupt)
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

    def announce(self, place: Place, extent: Extent, /) -> None:
        if self.caps.announces:
            cast("Announcer", self.inner).announce(place, extent)

    def scan(self, directory: Place, *, after: Cursor | None = None) -> AsyncIterator[Page]:
        return self._counted(self.inner.scan(directory, after=after))

    async def probe(self) -> Space:
        try:
            return await self.inner.probe()
        except HsfsError as error:
            self._count(error)
            raise

    async def aclose(self) -> None:
        await self.inner.aclose()

    def _counted(self, pages: AsyncIterator[Page]) -> AsyncIterator[Page]:
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


class _CountedPages:
    """Not a generator: closing this closes the listing below it, and nothing hangs between."""

    def __init__(self, meter: Metered, pages: AsyncIterator[Page]) -> None:
        self._meter = meter
        self._pages = pages

    def __aiter__(self) -> _CountedPages:
        return self

    async def __anext__(self) -> Page:
        try:
            page = await anext(self._pages)
        except HsfsError as error:
            self._meter.count_error(error)
            raise
        self._meter.count_page(page)
        return page

    async def aclose(self) -> None:
        close = getattr(self._pages, "aclose", None)
        if close is not None:
            await close()


class MeteredLister(Metered):
    """The same for a backend that lists whole prefixes."""

    def list_flat(self, prefix: Place, *, after: Cursor | None = None) -> AsyncIterator[Page]:
        inner: FlatLister = self.inner  # type: ignore[assignment]
        return self._counted(inner.list_flat(prefix, after=after))


def metered(backend: Backend) -> Metered:
    """`backend`, counted, with the powers that it has."""
    return MeteredLister(backend) if backend.caps.flat_list else Metered(backend)


def counters_of(backend: Backend) -> BackendCounters | None:
    """The counters of a backend under whatever decorators, None if it is not metered."""
    layer: object = backend
    while layer is not None:
        if isinstance(layer, Metered):
            return layer.counters()
        layer = getattr(layer, "inner", None)
    return None
