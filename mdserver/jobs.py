"""The job board: what the server wants to know of the sources, and the movers that find out.

`core.jobs.JobQueue` decides; this module waits. A listing streams to whoever asked for it, with the
mover held back when pages are not taken; one that nobody reads any more is dropped, and its mover
learns by LeaseLost at its next page. What a job's end says about its backend is passed to `health`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from hsfs.core.errors import (
    HsfsError,
    LeaseLost,
    TimedOut,
    Unauthorised,
    Unavailable,
    from_code,
)
from hsfs.core.jobs import Fault, Job, JobKind, JobQueue, Outcome
from hsfs.core.types import DeviceId, DirectoryPage, ObjectStat, Place, Space
from hsfs.proto.messages import FinishArgs, PagesArgs

log = structlog.get_logger("hsfs.mds.jobs")

TAKEN_WITHIN_S = 20.0  # a mover that died is started again within that
GRACE_S = 10.0  # of a mover beyond its backend's timeout
_AHEAD = 8  # batches that wait for a slow reader before its mover does

_T = TypeVar("_T")
Sink = Callable[[Sequence[DirectoryPage], bytes], Awaitable[None]]


@dataclass(slots=True)
class _Wanted:
    """The side that asked: batches of pages for listings, a sink for scans, and the end."""

    done: asyncio.Future[Outcome]
    batches: asyncio.Queue[tuple[DirectoryPage, ...] | None] | None = None
    sink: Sink | None = None
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    moved_s: float = 0.0  # last sign of progress


class JobBoard:
    """`mdserver.namespace.Surveyor`, and the movers' side of it. Run `run()` beside it.

    `timeout_s(device)`: the backend's time without progress. `health(device, error, root)`: how a
    job of the device ended (None = well), and whether it was about the backend's root.
    """

    def __init__(
        self,
        timeout_s: Callable[[int], float],
        health: Callable[[int, HsfsError | None, bool], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._health = health
        self._queue = JobQueue(self._lost)
        self._wanted: dict[int, _Wanted] = {}
        self._takers: deque[tuple[bytes, int, asyncio.Future[list[Job]]]] = deque()
        self._mover_s = time.monotonic()  # when any mover was last heard of
        self.finished = 0
        self.failed = 0

    async def run(self) -> None:
        """Take back the jobs of movers that fell silent; until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self._queue.expire(time.monotonic())
            self._serve_takers()

    # --- those who ask -----------------------------------------------------------------------

    async def list(self, device: DeviceId, directory: Place) -> AsyncIterator[DirectoryPage]:
        """One native directory, page by page. Raises what the backend raised, Unavailable,
        TimedOut."""
        wanted = _Wanted(_future(), asyncio.Queue(_AHEAD))
        assert wanted.batches is not None
        job = self._add(wanted, JobKind.LIST, device, (directory,))
        try:
            while True:
                batch = await self._progress(wanted, device, job, wanted.batches.get())
                if batch is None:
                    break
                for page in batch:
                    yield page
            _raise_fault(await wanted.done)
        finally:
            self._forget(job)

    async def stat(
        self, device: DeviceId, places: Sequence[Place]
    ) -> Sequence[ObjectStat | HsfsError]:
        """One answer per place, in order. Raises Unavailable, TimedOut, Unauthorised."""
        outcome = await self._simple(JobKind.STAT, device, tuple(places))
        if len(outcome.stats) != len(places):
            raise Unavailable("mover", "its answer is incomplete")
        answers: list[ObjectStat | HsfsError] = []
        for result in outcome.stats:
            if result.stat is not None:
                answers.append(result.stat)
            else:
                answers.append(as_error(result.fault or Fault("Unavailable", "no answer")))
        return answers

    async def probe(self, device: DeviceId) -> Space:
        """Space of a reachable backend. Raises what makes it unusable."""
        outcome = await self._simple(JobKind.PROBE, device, ())
        return outcome.space or Space(0, 0, 0, known=False)

    async def scan(
        self, device: DeviceId, cursor: bytes, sink: Sink, waiting: Callable[[], None]
    ) -> None:
        """The whole backend from `cursor` on; `sink` is given pages in order, with the cursor
        behind them. `waiting` is called when no mover took it for a while. Raises what the backend
        raised."""
        wanted = _Wanted(_future(), None, sink)
        job = self._add(wanted, JobKind.SCAN, device, (Place(b""),), cursor)
        try:
            while not wanted.done.done():
                await asyncio.wait((wanted.done,), timeout=TAKEN_WITHIN_S)
                if self._queue.holder(job) is None and not wanted.done.done():
                    waiting()
            _raise_fault(wanted.done.result())
        finally:
            self._forget(job)

    # --- movers ------------------------------------------------------------------------------

    async def take(self, mover: bytes, limit: int, wait_s: float) -> Sequence[Job]:
        """Jobs for a mover, as soon as there are any, at the latest (none) after `wait_s`."""
        self.renew(mover)
        jobs = self._queue.take(mover, limit, time.monotonic())
        if jobs or wait_s <= 0:
            return jobs
        future: asyncio.Future[list[Job]] = asyncio.get_running_loop().create_future()
        taker = (mover, limit, future)
        self._takers.append(taker)
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(future)
        except TimeoutError:
            return future.result() if future.done() else []
        finally:
            future.cancel()
            if taker in self._takers:
                self._takers.remove(taker)

    async def pages(self, args: PagesArgs) -> None:
        """Results of a job; returns when they are taken in. Raises LeaseLost."""
        wanted = self._held(args.job, args.token)
        wanted.moved_s = time.monotonic()
        async with wanted.order:
            self._held(args.job, args.token)
            if wanted.batches is not None:
                await wanted.batches.put(args.pages)
            elif wanted.sink is not None:
                await wanted.sink(args.pages, args.cursor)
                if args.cursor:
                    self._queue.set_cursor(args.job, args.cursor)

    async def finish(self, args: FinishArgs) -> None:
        """A job's end. Raises LeaseLost."""
        wanted = self._held(args.job, args.token)
        held = self._queue.holder(args.job)
        assert held is not None
        async with wanted.order:  # behind the pages that came before
            self._held(args.job, args.token)
            if wanted.batches is not None:
                await wanted.batches.put(None)
            self._end(args.job, args.outcome, marked=True)
        job = held.job
        root = job.kind is JobKind.PROBE or any(place.key == b"" for place in job.places)
        self._health(job.device, _verdict(args.outcome), root)
        self._serve_takers()

    def renew(self, mover: bytes) -> None:
        """A sign of life."""
        self._mover_s = time.monotonic()
        self._queue.renew(mover, self._mover_s)

    def release(self, mover: bytes) -> None:
        """The mover's connection is gone."""
        for taker in [taker for taker in self._takers if taker[0] == mover]:
            taker[2].cancel()
            self._takers.remove(taker)
        self._queue.release(mover)
        self._serve_takers()

    def counts(self) -> tuple[int, int]:
        """Jobs that wait, jobs that a mover has."""
        held = sum(taken for _, taken in self._queue.jobs())
        return len(self._queue) - held, held

    def devices(self) -> set[int]:
        """Devices with a job of any kind."""
        return {job.device for job, _ in self._queue.jobs()}

    # --- inside ------------------------------------------------------------------------------

    def _add(
        self,
        wanted: _Wanted,
        kind: JobKind,
        device: int,
        places: tuple[Place, ...],
        cursor: bytes = b"",
    ) -> int:
        wanted.moved_s = time.monotonic()
        job = self._queue.add(kind, device, places, cursor)
        self._wanted[job] = wanted
        self._serve_takers()
        return job

    async def _simple(self, kind: JobKind, device: int, places: tuple[Place, ...]) -> Outcome:
        wanted = _Wanted(_future())
        job = self._add(wanted, kind, device, places)
        try:
            outcome = await self._progress(wanted, device, job, asyncio.shield(wanted.done))
            _raise_fault(outcome)
            return outcome
        finally:
            self._forget(job)

    async def _progress(
        self, wanted: _Wanted, device: int, job: int, awaitable: Awaitable[_T]
    ) -> _T:
        """The awaited, or an error when the job makes no progress."""
        waiting = asyncio.ensure_future(awaitable)
        limit_s = self._timeout_s(device) + GRACE_S
        try:
            while True:
                left_s = wanted.moved_s + limit_s - time.monotonic()
                done, _ = await asyncio.wait((waiting,), timeout=min(TAKEN_WITHIN_S / 4, left_s))
                if done:
                    wanted.moved_s = time.monotonic()
                    return waiting.result()
                if self._queue.holder(job) is None and not self._busy(device) and self._alone:
                    raise Unavailable("mover", "none is running", "see the metadata server's log")
                if time.monotonic() - wanted.moved_s >= limit_s:
                    error = TimedOut("mover", f"no progress for {limit_s:.0f} s")
                    self._health(device, error, False)
                    raise error
        finally:
            waiting.cancel()

    @property
    def _alone(self) -> bool:
        """Whether there is no mover."""
        heard_s = time.monotonic() - self._mover_s
        return not self._takers and heard_s > TAKEN_WITHIN_S

    def _busy(self, device: int) -> bool:
        """Whether movers have other jobs of the device: ours may only be waiting for its turn."""
        return any(taken and job.device == device for job, taken in self._queue.jobs())

    def _held(self, job: int, token: int) -> _Wanted:
        wanted = self._wanted.get(job)
        if wanted is None or self._queue.held(job, token) is None:
            raise LeaseLost(f"job {job}", "it was given to another mover, or nobody wants it now")
        return wanted

    def _end(self, job: int, outcome: Outcome, *, marked: bool) -> None:
        self._queue.finish(job)
        wanted = self._wanted.pop(job, None)
        self.finished += 1
        self.failed += outcome.fault is not None
        if wanted is None or wanted.done.done():
            return
        wanted.done.set_result(outcome)
        if wanted.batches is not None and not marked:
            if wanted.batches.full():
                wanted.batches.get_nowait()  # it failed anyway
            wanted.batches.put_nowait(None)

    def _forget(self, job: int) -> None:
        self._wanted.pop(job, None)
        if self._queue.finish(job):
            self._serve_takers()

    def _lost(self, job: Job) -> None:
        log.error("a job was lost by several movers", job=job.id, kind=job.kind.name)
        fault = Fault("Unavailable", "mover", "it died several times over this")
        self._end(job.id, Outcome(fault), marked=False)

    def _serve_takers(self) -> None:
        while self._takers:
            mover, limit, future = self._takers[0]
            if future.done():
                self._takers.popleft()
                continue
            jobs = self._queue.take(mover, limit, time.monotonic())
            if not jobs:
                return
            self._takers.popleft()
            future.set_result(jobs)


def _future() -> asyncio.Future[Outcome]:
    return asyncio.get_running_loop().create_future()


def as_error(fault: Fault) -> HsfsError:
    """The error that a fault stands for."""
    return from_code(fault.code, fault.what, fault.why, fault.next_step)


def _verdict(outcome: Outcome) -> HsfsError | None:
    """What an outcome says of the backend as a whole."""
    if outcome.fault is not None:
        return as_error(outcome.fault)
    for result in outcome.stats:
        if result.fault is not None:
            error = as_error(result.fault)
            if isinstance(error, Unavailable | Unauthorised):
                return error
    return None


def _raise_fault(outcome: Outcome) -> None:
    if outcome.fault is not None:
        raise as_error(outcome.fault)
