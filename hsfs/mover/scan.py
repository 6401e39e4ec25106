"""Whole backends: by flat list where the backend has one, else directory by directory.

Directories are taken in the order of their paths, parents first, several at a time; the cursor is
the smallest path that is not finished. Going on from it lists the directories above it again (they
are few) and skips whatever lies wholly before it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import cast

import msgspec
import structlog
import trio

from hsfs.core.errors import (
    HsfsError,
    NotADirectory,
    NotFound,
    ProtocolError,
    StaleHandle,
    Unauthorised,
)
from hsfs.core.ports import Backend, FlatLister
from hsfs.core.types import Cursor, DirectoryPage, FileType, ObjectStat, Place
from hsfs.mover.delivery import Delivery
from hsfs.mover.flat import FlatCutter
from hsfs.mover.listing import pieces, steadily, survey

log = structlog.get_logger("hsfs.mover.scan")

WORKERS_MAX = 8  # directories at a time: interactive work needs the backend as well
_SKIPPED = (NotFound, NotADirectory, StaleHandle, Unauthorised)

_FlatCursor = tuple[bytes, bytes]  # the backend's cursor, the last key before it
_encode = msgspec.msgpack.Encoder().encode
_decode_flat = msgspec.msgpack.Decoder(_FlatCursor).decode


async def scan(backend: Backend, cursor: bytes, delivery: Delivery, *, timeout_s: float) -> None:
    """Deliver the whole backend from `cursor` (b"" = from the start) on.

    Raises what the backend raises, and LeaseLost.
    """
    if backend.caps.flat_list:
        await _flat(backend, cursor, delivery, timeout_s)
    else:
        await _TreeScan(backend, cursor, delivery, timeout_s).run()
    await delivery.drain()


async def _flat(backend: Backend, cursor: bytes, delivery: Delivery, timeout_s: float) -> None:
    after: Cursor | None = None
    after_key = b""
    if cursor:
        try:
            resumed, after_key = _decode_flat(cursor)
        except msgspec.MsgspecError as error:
            raise ProtocolError("scan cursor", str(error)) from error
        after = Cursor(resumed)
    cutter = FlatCutter(backend.device, time.time_ns(), after_key)
    # Decorators forward the optional power that `caps.flat_list` announces.
    lister = cast("FlatLister", backend)
    what = f"listing of device {backend.device}"
    async for page in steadily(lister.list_flat(Place(b""), after=after), timeout_s, what):
        parts = list(pieces(page.entries))
        for index, part in enumerate(parts):
            whole = index == len(parts) - 1
            await delivery(cutter.cut(part, end=whole and page.cursor == b""))
        # The cutter may have carried a marker over: the cursor then has to stay before it.
        if page.cursor and page.entries and cutter.last_key == page.entries[-1].place.key:
            await delivery.flush(_encode((page.cursor, cutter.last_key)))


class _TreeScan:
    """One scan of a hierarchical backend (or of a flat one without a flat list)."""

    def __init__(
        self, backend: Backend, cursor: bytes, delivery: Delivery, timeout_s: float
    ) -> None:
        self._backend = backend
        self._cursor = cursor
        self._delivery = delivery
        self._timeout_s = timeout_s
        self._due: list[tuple[bytes, int, Place]] = [(b"", 0, Place(b""))]
        self._count = 0
        self._busy: set[bytes] = set()
        self._idle = trio.lowlevel.ParkingLot()
        self._sending = trio.Lock()
        self._scope = trio.CancelScope()
        self._error: HsfsError | None = None

    async def run(self) -> None:
        workers = max(1, min(WORKERS_MAX, self._backend.caps.concurrency))
        with self._scope:
            async with trio.open_nursery() as nursery:
                for _ in range(workers):
                    nursery.start_soon(self._work)
        if self._error is not None:
            raise self._error

    async def _work(self) -> None:
        while True:
            while not self._due:
                if not self._busy:
                    self._idle.unpark_all()
                    return
                await self._idle.park()
            path, _, place = heapq.heappop(self._due)
            self._busy.add(path)
            try:
                await self._directory(path, place)
            except HsfsError as error:
                self._error = self._error or error
                self._scope.cancel()
                return
            self._busy.discard(path)
            self._idle.unpark_all()

    async def _directory(self, path: bytes, place: Place) -> None:
        # A directory above the cursor is listed again for its subdirectories.
        children: list[tuple[bytes, Place]] = []

        async def deliver(pages: Sequence[DirectoryPage]) -> None:
            for page in pages:
                if not page.names_only:
                    children.extend(self._children(page.entries))
            async with self._sending:
                await self._delivery(pages)

        try:
            await survey(self._backend, place, deliver, timeout_s=self._timeout_s)
        except _SKIPPED as error:
            if not path:
                raise
            # Removed meanwhile, or closed to us: the rest is no worse for it.
            log.info("skipped a directory", device=self._backend.device, why=error.code)
        for child, where in children:
            self._count += 1
            heapq.heappush(self._due, (child, self._count, where))
        self._idle.unpark_all()
        async with self._sending:
            if self._delivery.full:
                # This directory counts as finished: its pages go out with this very message.
                others = [other for other in self._busy if other != path]
                open_paths = [*others, *(self._due[0][:1] if self._due else ())]
                await self._delivery.flush(min(open_paths, default=path) or b"")

    def _children(self, entries: Sequence[ObjectStat]) -> list[tuple[bytes, Place]]:
        flat = self._backend.caps.flat
        found: list[tuple[bytes, Place]] = []
        for entry in entries:
            if entry.type is FileType.DIRECTORY:
                path = path_of(entry.place.key, flat)
                if not is_before(path, self._cursor):
                    found.append((path, entry.place))
        return found


def path_of(key: bytes, flat: bool) -> bytes:
    """A directory's place in the order of the scan: what lies below X sorts right behind it."""
    if not key:
        return b""
    return b"\0" + (key[:-1] if flat else key).replace(b"/", b"\0")


def is_before(path: bytes, cursor: bytes) -> bool:
    """Whether the directory and all below it lie before the cursor."""
    return path < cursor and not cursor.startswith(path + b"\0")
