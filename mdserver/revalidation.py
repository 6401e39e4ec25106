"""Asking the sources: shared listings, batched stats, and a memory of backends in trouble.

Two users of one due directory share one listing. Names that fall due in the same turn of the loop
travel in one stat job. A backend that failed is asked again by one caller every few seconds; all
others are answered its error at once, so that trouble costs the first caller its patience and
nobody else. The deadline is without progress: each page of a listing renews it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from hsfs.core.clock import Clock
from hsfs.core.errors import (
    HsfsError,
    NotADirectory,
    NotFound,
    TimedOut,
    Unauthorised,
    Unavailable,
)
from hsfs.core.types import DirectoryPage, ObjectStat, Place
from hsfs.mdserver.surveyor import Surveyor
from hsfs.mdserver.volume import DeviceFacts

log = logging.getLogger(__name__)

PROBE_EVERY_S = 3.0
STATS_MAX = 64  # places per stat job


@dataclass(slots=True)
class _Trouble:
    error: HsfsError
    probe_at_s: float
    probing: int = 0


@dataclass(slots=True, eq=False)
class Listing:
    """A listing under way, shared by all that wait for it. `pages` and `entries` grow."""

    started_ns: int
    pages: int = 0
    entries: int = 0
    done: bool = False
    error: HsfsError | None = None
    _pulse: asyncio.Event = field(default_factory=asyncio.Event)

    def advance(self) -> None:
        """Something has happened: wake those that wait."""
        self._pulse.set()
        self._pulse = asyncio.Event()

    async def until(self, enough: Callable[[], bool]) -> None:
        """Wait until `enough()` or the end. Raises what ended it early."""
        while not self.done and not enough():
            await self._pulse.wait()
        if self.error is not None and not enough():
            raise type(self.error)(self.error.what, self.error.why, self.error.next_step)


@dataclass(slots=True)
class _Batch:
    places: list[Place] = field(default_factory=list)
    answers: list[asyncio.Future[ObjectStat | HsfsError]] = field(default_factory=list)


class Revalidation:
    """Runs listings and stats in `tasks`; `apply` merges a page; `gone` is told when a directory
    is not there any more; `health(device, state, why)` when a backend fails or answers again."""

    def __init__(
        self,
        surveyor: Surveyor,
        tasks: asyncio.TaskGroup,
        clock: Clock,
        apply: Callable[[DirectoryPage], Awaitable[int]],
        gone: Callable[[DeviceFacts, int, int], Awaitable[None]],
        health: Callable[[int, str, str], None],
    ) -> None:
        self._surveyor = surveyor
        self._tasks = tasks
        self._clock = clock
        self._apply = apply
        self._gone = gone
        self._health = health
        self._listings: dict[tuple[int, int], Listing] = {}
        self._batches: dict[int, _Batch] = {}
        self._troubles: dict[int, _Trouble] = {}

    # Trouble

    def failed(self, facts: DeviceFacts, error: HsfsError) -> None:
        """The backend did not answer."""
        if not isinstance(error, Unavailable | Unauthorised):
            self.worked(facts)  # an answer, if not the one that was hoped for
            return
        self._troubles[facts.id] = _Trouble(error, self._clock.monotonic() + PROBE_EVERY_S)
        state = "unauthorised" if isinstance(error, Unauthorised) else "unreachable"
        self._health(facts.id, state, error.why or str(error))

    def worked(self, facts: DeviceFacts) -> None:
        """The backend answered."""
        self._troubles.pop(facts.id, None)
        self._health(facts.id, "ok", "")

    def forget_trouble(self, device: int) -> None:
        """Somebody else knows that the backend is well."""
        self._troubles.pop(device, None)

    def known_trouble(self, device: int, error: HsfsError) -> None:
        """Somebody else knows that the backend is not."""
        if device not in self._troubles:
            self._troubles[device] = _Trouble(error, self._clock.monotonic() + PROBE_EVERY_S)

    def _enter(self, facts: DeviceFacts, force: bool) -> None:
        """Raises the error of a backend in trouble, but for one caller every few seconds."""
        trouble = self._troubles.get(facts.id)
        if trouble is None:
            return
        now_s = self._clock.monotonic()
        if force or (not trouble.probing and now_s >= trouble.probe_at_s):
            trouble.probing += 1
            trouble.probe_at_s = now_s + PROBE_EVERY_S
            return
        error = trouble.error
        raise type(error)(error.what, error.why, error.next_step)

    def _left(self, facts: DeviceFacts) -> None:
        trouble = self._troubles.get(facts.id)
        if trouble is not None and trouble.probing:
            trouble.probing -= 1

    # Listings

    def running(self, device: int, directory: int) -> Listing | None:
        """The listing of a native directory that is under way."""
        return self._listings.get((device, directory))

    def listing(
        self, facts: DeviceFacts, directory: int, place: Place, need_ns: int, force: bool = False
    ) -> Listing:
        """Join the listing of a native directory that began at or after `need_ns`, or begin one.
        Raises the known trouble of its backend."""
        key = (int(facts.id), directory)
        running = self._listings.get(key)
        if running is not None and running.started_ns >= need_ns:
            return running
        self._enter(facts, force)
        listing = Listing(self._clock.time_ns())
        self._listings[key] = listing
        self._tasks.create_task(self._list(facts, directory, place, listing))
        return listing

    async def _list(
        self, facts: DeviceFacts, directory: int, place: Place, listing: Listing
    ) -> None:
        error: HsfsError | None = None
        try:
            async with aclosing(_pages(self._surveyor, facts, place)) as pages:
                async for page in pages:
                    listing.entries += await self._apply(page)
                    listing.pages += 1
                    listing.advance()
            self.worked(facts)
        except NotFound as absent:
            self.worked(facts)
            error = await self._report_gone(facts, directory, listing.started_ns, absent)
        except NotADirectory:
            self.worked(facts)
            error = await self._report_gone(facts, directory, listing.started_ns, None)
        except HsfsError as trouble:
            error = trouble
            self.failed(facts, trouble)
        except Exception as bug:
            log.exception("listing a directory of backend %s failed", facts.name)
            error = Unavailable(f"backend {facts.name}", str(bug) or type(bug).__name__)
        finally:
            self._left(facts)
            listing.error = error
            listing.done = True
            if self._listings.get((int(facts.id), directory)) is listing:
                del self._listings[(int(facts.id), directory)]
            listing.advance()

    async def _report_gone(
        self, facts: DeviceFacts, directory: int, as_of_ns: int, absent: HsfsError | None
    ) -> HsfsError | None:
        if directory == facts.ino:
            why = absent.why if absent is not None else "its URL names no directory"
            self._health(facts.id, "missing", why or "it does not exist")
            return Unavailable(f"backend {facts.name}", why or "it does not exist")
        try:
            await self._gone(facts, directory, as_of_ns)
        except HsfsError as error:
            return error
        return None

    # Stats

    async def stat(
        self, facts: DeviceFacts, places: Sequence[Place], force: bool = False
    ) -> list[ObjectStat | NotFound]:
        """What the source says of each place now. Raises what keeps it from answering."""
        self._enter(facts, force)
        try:
            loop = asyncio.get_running_loop()
            mine: list[asyncio.Future[ObjectStat | HsfsError]] = []
            for place in places:
                batch = self._batches.get(facts.id)
                if batch is None:
                    batch = self._batches[facts.id] = _Batch()
                    loop.call_soon(self._flush, facts, batch)
                future = loop.create_future()
                batch.places.append(place)
                batch.answers.append(future)
                mine.append(future)
                if len(batch.places) == STATS_MAX:
                    del self._batches[facts.id]
            answers: list[ObjectStat | NotFound] = []
            for answer in [await future for future in mine]:
                if isinstance(answer, HsfsError) and not isinstance(answer, NotFound):
                    self.failed(facts, answer)
                    raise type(answer)(answer.what, answer.why, answer.next_step)
                answers.append(answer)
            self.worked(facts)
            return answers
        finally:
            self._left(facts)

    def _flush(self, facts: DeviceFacts, batch: _Batch) -> None:
        if self._batches.get(facts.id) is batch:
            del self._batches[facts.id]
        self._tasks.create_task(self._ask(facts, batch))

    async def _ask(self, facts: DeviceFacts, batch: _Batch) -> None:
        answers: Sequence[ObjectStat | HsfsError]
        try:
            async with asyncio.timeout(facts.timeout_s):
                answers = await self._surveyor.stat(facts.id, batch.places)
        except TimeoutError:
            answers = [_timed_out(facts)] * len(batch.places)
        except HsfsError as error:
            answers = [error] * len(batch.places)
        except Exception as bug:
            log.exception("asking backend %s failed", facts.name)
            why = str(bug) or type(bug).__name__
            answers = [Unavailable(f"backend {facts.name}", why)] * len(batch.places)
        except asyncio.CancelledError:
            for future in batch.answers:
                future.cancel()
            raise
        for future, answer in zip(batch.answers, answers, strict=True):
            if not future.done():
                future.set_result(answer)


async def _pages(
    surveyor: Surveyor, facts: DeviceFacts, place: Place
) -> AsyncGenerator[DirectoryPage, None]:
    """Pages of a listing, each within the backend's timeout of the one before."""
    pages = surveyor.list(facts.id, place)
    try:
        while True:
            try:
                async with asyncio.timeout(facts.timeout_s):
                    page = await anext(pages)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise _timed_out(facts) from error
            yield page
    finally:
        close = getattr(pages, "aclose", None)
        if close is not None:
            await close()


def _timed_out(facts: DeviceFacts) -> TimedOut:
    return TimedOut(
        f"backend {facts.name}",
        f"no answer within {facts.timeout_s:g} s",
        "see `hsfs status`; `timeout` of the backend sets the patience",
    )
