"""One native directory as DirectoryPages.

Where the backend lists in order, each page of it claims the range that it covers. Where it does
not, nothing can be claimed before all of it is known: a listing that ends soon is sorted and cut
into ranges; a long one is sent as it comes, `adds_only`, and at its end the sorted names alone
prune what is gone.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import cast

import trio

from hsfs.core.errors import TimedOut
from hsfs.core.ports import Backend
from hsfs.core.types import DirectoryPage, FileType, ObjectStat, Page, Place

Deliver = Callable[[Sequence[DirectoryPage]], Awaitable[None]]

ENTRIES_MAX = 1000  # of one page that is sent: the server applies it without a pause
BYTES_MAX = 600 * 1024
EARLY_ENTRIES = 20_000
EARLY_S = 0.7
_NAMES_MAX = 4000
_ENTRY_BYTES = 100  # an encoded entry without its strings


def sort_key(entry: ObjectStat, flat: bool) -> bytes:
    """The raw name by which listings are ordered: prefixes compare with their trailing slash."""
    return entry.name + b"/" if flat and entry.type is FileType.DIRECTORY else entry.name


def entry_bytes(entry: ObjectStat) -> int:
    """About how many bytes an entry takes in a frame."""
    place = entry.place
    strings = len(entry.name) + len(place.key) + len(place.handle) + len(entry.target)
    return _ENTRY_BYTES + strings


def pieces(entries: Sequence[ObjectStat]) -> Iterator[Sequence[ObjectStat]]:
    """The entries in pieces that fit into a frame, at least one (empty) piece."""
    begin = size = 0
    for index, entry in enumerate(entries):
        size += entry_bytes(entry)
        if index > begin and (index - begin >= ENTRIES_MAX or size > BYTES_MAX):
            yield entries[begin:index]
            begin, size = index, entry_bytes(entry)
    yield entries[begin:]


async def survey(backend: Backend, directory: Place, deliver: Deliver, *, timeout_s: float) -> int:
    """List a directory and deliver its pages in order; the number of entries.

    Raises what the backend raises, TimedOut when no page comes for `timeout_s`, and what `deliver`
    raises. Cancelled: what was delivered stays delivered.
    """
    began_ns = time.time_ns()
    if backend.caps.ordered:
        return await _ordered(backend, directory, deliver, began_ns, timeout_s)
    return await _unordered(backend, directory, deliver, began_ns, timeout_s)


async def _ordered(
    backend: Backend, directory: Place, deliver: Deliver, began_ns: int, timeout_s: float
) -> int:
    device, flat = backend.device, backend.caps.flat
    after, seen = b"", 0
    held: list[ObjectStat] = []
    async for page in steadily(backend.scan(directory), timeout_s, f"listing of device {device}"):
        seen += len(page.entries)
        parts = list(pieces(page.entries))
        for index, piece in enumerate(parts):
            end = page.cursor == b"" and index == len(parts) - 1
            held.extend(piece)
            upto = b"" if end or not held else sort_key(held[-1], flat)
            if not end and not upto:
                # Nothing, or the directory's own marker alone: b"" would claim the whole directory.
                continue
            await deliver([DirectoryPage(device, directory, tuple(held), after, upto, began_ns)])
            after = upto
            held.clear()
    return seen


async def _unordered(
    backend: Backend, directory: Place, deliver: Deliver, began_ns: int, timeout_s: float
) -> int:
    device, flat = backend.device, backend.caps.flat
    began_s = trio.current_time()
    held: list[ObjectStat] = []
    names: list[tuple[bytes, bytes, FileType]] = []
    early = False
    async for page in steadily(backend.scan(directory), timeout_s, f"listing of device {device}"):
        held.extend(page.entries)
        late = trio.current_time() - began_s > EARLY_S
        if page.cursor != b"" and (early or late or len(held) > EARLY_ENTRIES):
            early = True
            for piece in pieces(held):
                await deliver(
                    [
                        DirectoryPage(
                            device, directory, tuple(piece), as_of_ns=began_ns, adds_only=True
                        )
                    ]
                )
            names.extend((sort_key(entry, flat), entry.name, entry.type) for entry in held)
            held.clear()
    held.sort(key=lambda entry: sort_key(entry, flat))
    if not early:
        await _ranges(device, directory, list(pieces(held)), deliver, began_ns, flat, False)
        return len(held)
    for piece in pieces(held):
        if piece:
            await deliver(
                [DirectoryPage(device, directory, tuple(piece), as_of_ns=began_ns, adds_only=True)]
            )
    names.extend((sort_key(entry, flat), entry.name, entry.type) for entry in held)
    names.sort()
    nowhere = Place(b"")
    bare = [ObjectStat(name, kind, nowhere) for _, name, kind in names]
    cuts: list[Sequence[ObjectStat]] = [
        bare[at : at + _NAMES_MAX] for at in range(0, len(bare), _NAMES_MAX)
    ]
    await _ranges(device, directory, cuts or [[]], deliver, began_ns, flat, True)
    return len(names)


async def _ranges(
    device: int,
    directory: Place,
    parts: Sequence[Sequence[ObjectStat]],
    deliver: Deliver,
    began_ns: int,
    flat: bool,
    names_only: bool,
) -> None:
    after = b""
    for index, part in enumerate(parts):
        upto = b"" if index == len(parts) - 1 else sort_key(part[-1], flat)
        await deliver(
            [
                DirectoryPage(
                    device,
                    directory,
                    tuple(part),
                    after,
                    upto,
                    began_ns,
                    names_only=names_only,
                )
            ]
        )
        after = upto


async def steadily(pages: object, timeout_s: float, what: str) -> AsyncGenerator[Page, None]:
    """The pages of a backend's listing; TimedOut when the next does not come in time.

    The backend has a deadline of its own: this one is for a backend that forgets it.
    """
    async with aclosing(cast("AsyncGenerator[Page, None]", pages)) as source:
        while True:
            page: Page | None = None
            with trio.move_on_after(timeout_s) as scope:
                page = await anext(source, None)
            if scope.cancelled_caught:
                raise TimedOut(what, f"no page for {timeout_s:.0f} s")
            if page is None:
                return
            yield page
            if page.cursor == b"":
                return
