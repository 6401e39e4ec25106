"""What decorators of a backend share: every call goes through to the backend below."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

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


class Forwarding:
    """A Backend, and FlatLister and Announcer as far as `caps` of the one below says so.

    A decorator overrides what it changes; listings of both kinds pass through `_listing`.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def device(self) -> DeviceId:
        return self.inner.device

    @property
    def caps(self) -> Capabilities:
        return self.inner.caps

    async def stat(self, place: Place) -> ObjectStat:
        return await self.inner.stat(place)

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
        return self.inner.read_into(place, offset, buf, expect=expect, interrupt=interrupt)

    def announce(self, place: Place, extent: Extent, /) -> None:
        if self.caps.announces:
            cast("Announcer", self.inner).announce(place, extent)

    def scan(self, directory: Place, *, after: Cursor | None = None) -> AsyncIterator[Page]:
        return self._listing("scan", directory, self.inner.scan(directory, after=after))

    def list_flat(self, prefix: Place, *, after: Cursor | None = None) -> AsyncIterator[Page]:
        pages = cast("FlatLister", self.inner).list_flat(prefix, after=after)
        return self._listing("list_flat", prefix, pages)

    async def probe(self) -> Space:
        return await self.inner.probe()

    async def aclose(self) -> None:
        await self.inner.aclose()

    def _listing(
        self, operation: str, place: Place, pages: AsyncIterator[Page]
    ) -> AsyncIterator[Page]:
        return pages


class ForwardedPages:
    """A listing that a decorator looks at: override `__anext__`. Not a generator, so that closing
    it closes the listing below and nothing hangs between."""

    def __init__(self, pages: AsyncIterator[Page]) -> None:
        self.pages = pages

    def __aiter__(self) -> AsyncIterator[Page]:
        return self

    async def __anext__(self) -> Page:
        return await anext(self.pages)

    async def aclose(self) -> None:
        close = getattr(self.pages, "aclose", None)
        if close is not None:
            await close()
