"""Work that the metadata server gives to movers: values, and the queue as a pure state machine.

A job is taken under a lease. Whoever loses the lease (silence, a broken connection) loses the job,
which goes back to the front of its queue with a new token; what still arrives under the old token
is refused. A job that was lost `ATTEMPTS_MAX` times fails instead, so that one which kills movers
does not kill them all.

Interactive jobs (somebody waits) go before scans. A device hands out at most `per_device` of each
class at a time, so that the jobs of a dead backend cannot fill the movers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from hsfs.core.types import ObjectStat, Place, Space, Wire

ATTEMPTS_MAX = 5
LEASE_S = 15.0


class JobKind(IntEnum):
    """What a job asks for. Values are sent: never renumbered."""

    LIST = 1  # one directory, page by page
    STAT = 2  # several places
    PROBE = 3  # reachability, authority and space of a backend
    SCAN = 4  # the whole backend


class Job(Wire, frozen=True, array_like=True, gc=False):
    """One piece of work. `cursor`: where a scan goes on (b"" = from the start)."""

    id: int
    token: int
    kind: JobKind
    device: int
    places: tuple[Place, ...] = ()
    cursor: bytes = b""


class Fault(Wire, frozen=True, array_like=True, gc=False):
    """An error as a value: see `hsfs.core.errors.from_code`."""

    code: str
    what: str
    why: str = ""
    next_step: str = ""


class StatResult(Wire, frozen=True, array_like=True, gc=False):
    """The answer for one place of a STAT job: a stat, or why not."""

    stat: ObjectStat | None
    fault: Fault | None = None


class Outcome(Wire, frozen=True, array_like=True, gc=False):
    """How a job ended. `fault` None = well."""

    fault: Fault | None = None
    stats: tuple[StatResult, ...] = ()
    space: Space | None = None


@dataclass(slots=True)
class Held:
    """A job that a mover works on. `token` changes with every handing out."""

    job: Job
    mover: bytes
    until_s: float


@dataclass(slots=True)
class _Waiting:
    job: Job
    attempts: int


@dataclass(slots=True)
class _Lane:
    """The jobs of one device in one class."""

    waiting: deque[_Waiting] = field(default_factory=deque)
    held: int = 0


class JobQueue:
    """Pure: the clock is passed in, nothing waits. `lost` is called with jobs that gave up."""

    def __init__(
        self,
        lost: Callable[[Job], None],
        *,
        lease_s: float = LEASE_S,
        interactive_per_device: int = 32,
        scans_per_device: int = 1,
    ) -> None:
        self._lost = lost
        self._lease_s = lease_s
        self._limits = (interactive_per_device, scans_per_device)
        self._lanes: tuple[dict[int, _Lane], dict[int, _Lane]] = ({}, {})
        self._held: dict[int, Held] = {}
        self._attempts: dict[int, int] = {}
        self._last_id = 0
        self._last_token = 0

    def add(
        self, kind: JobKind, device: int, places: tuple[Place, ...] = (), cursor: bytes = b""
    ) -> int:
        """Queue a job; its id."""
        self._last_id += 1
        job = Job(self._last_id, 0, kind, device, places, cursor)
        self._lane(job).waiting.append(_Waiting(job, 0))
        return job.id

    def take(self, mover: bytes, limit: int, now_s: float) -> list[Job]:
        """Hand out up to `limit` jobs, interactive first, devices in turn."""
        taken: list[Job] = []
        for lanes, most in zip(self._lanes, self._limits, strict=True):
            progress = True
            while progress and len(taken) < limit:
                progress = False
                for lane in list(lanes.values()):
                    if len(taken) >= limit:
                        break
                    if lane.waiting and lane.held < most:
                        taken.append(self._hand_out(lane, mover, now_s))
                        progress = True
            # A device that was served goes behind the others.
            for device in {job.device for job in taken}:
                if device in lanes:
                    lanes[device] = lanes.pop(device)
        return taken

    def held(self, job_id: int, token: int) -> Held | None:
        """The job if `token` still holds it."""
        held = self._held.get(job_id)
        return held if held is not None and held.job.token == token else None

    def holder(self, job_id: int) -> Held | None:
        """Who works on the job, if anybody does."""
        return self._held.get(job_id)

    def renew(self, mover: bytes, now_s: float) -> None:
        """The mover lives: all that it holds is its for another lease."""
        for held in self._held.values():
            if held.mover == mover:
                held.until_s = now_s + self._lease_s

    def set_cursor(self, job_id: int, cursor: bytes) -> None:
        """Where the job goes on if it has to be handed out again."""
        held = self._held.get(job_id)
        if held is not None:
            held.job = _with(held.job, held.job.token, cursor)
            self._attempts[job_id] = 1  # progress: not the job's fault if its mover dies now

    def finish(self, job_id: int) -> bool:
        """The job is over, wherever it was; whether it was known."""
        held = self._held.pop(job_id, None)
        self._attempts.pop(job_id, None)
        if held is not None:
            self._lane(held.job).held -= 1
            return True
        for lanes in self._lanes:
            for lane in lanes.values():
                for waiting in lane.waiting:
                    if waiting.job.id == job_id:
                        lane.waiting.remove(waiting)
                        return True
        return False

    def release(self, mover: bytes) -> None:
        """The mover is gone: its jobs wait again."""
        self._drop([held for held in self._held.values() if held.mover == mover])

    def expire(self, now_s: float) -> None:
        """Take back what silent movers hold."""
        self._drop([held for held in self._held.values() if held.until_s <= now_s])

    def jobs(self) -> Iterator[tuple[Job, bool]]:
        """Every job, and whether a mover has it."""
        for held in self._held.values():
            yield held.job, True
        for lanes in self._lanes:
            for lane in lanes.values():
                for waiting in lane.waiting:
                    yield waiting.job, False

    def __len__(self) -> int:
        waiting = sum(len(lane.waiting) for lanes in self._lanes for lane in lanes.values())
        return waiting + len(self._held)

    def _lane(self, job: Job) -> _Lane:
        lanes = self._lanes[1 if job.kind is JobKind.SCAN else 0]
        return lanes.setdefault(job.device, _Lane())

    def _hand_out(self, lane: _Lane, mover: bytes, now_s: float) -> Job:
        waiting = lane.waiting.popleft()
        lane.held += 1
        self._last_token += 1
        job = _with(waiting.job, self._last_token, waiting.job.cursor)
        self._attempts[job.id] = waiting.attempts + 1
        self._held[job.id] = Held(job, mover, now_s + self._lease_s)
        return job

    def _drop(self, gone: list[Held]) -> None:
        for held in sorted(gone, key=lambda held: -held.job.id):
            job = held.job
            del self._held[job.id]
            lane = self._lane(job)
            lane.held -= 1
            attempts = self._attempts.pop(job.id, 1)
            if attempts >= ATTEMPTS_MAX:
                self._lost(job)
            else:
                lane.waiting.appendleft(_Waiting(job, attempts))


def _with(job: Job, token: int, cursor: bytes) -> Job:
    return Job(job.id, token, job.kind, job.device, job.places, cursor)
