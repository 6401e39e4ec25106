"""The mover: takes jobs from a metadata server and does them with backends of its own.

Every job ends with an outcome, whatever happens; one whose lease was lost just stops. Backends are
opened when a job first needs them, again when they could not be, and anew when their definition
changes. A backend that hangs holds up its own jobs only, each for its timeout.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog
import trio

from hsfs.core.errors import HsfsError, LeaseLost, NotFound, TimedOut, Unavailable
from hsfs.core.jobs import Fault, Job, JobKind, Outcome, StatResult
from hsfs.core.ports import Backend, Device
from hsfs.core.types import DeviceId, Place
from hsfs.mover.delivery import Delivery
from hsfs.mover.listing import survey
from hsfs.mover.scan import scan
from hsfs.rpc.client import MdsClient

log = structlog.get_logger("hsfs.mover")

Opener = Callable[[DeviceId, str, Mapping[str, str | int | float | bool]], Awaitable[Backend]]

JOBS_MAX = 256
_TAKE_MAX = 32
_TAKE_WAIT_S = 20.0
_STATS_AT_ONCE = 16
_DEVICES_EVERY_S = 10.0
_SLACK_S = 3.0  # beyond a backend's own deadline


@dataclass(slots=True)
class _Slot:
    """A device and its backend, once open."""

    device: Device
    backend: Backend | None = None
    opening: trio.Lock = field(default_factory=trio.Lock)
    failure: HsfsError | None = None
    failed_s: float = -1.0


class Mover:
    """Runs until cancelled: `await Mover(client, open_backend).run()`."""

    def __init__(self, client: MdsClient, opener: Opener) -> None:
        self._client = client
        self._opener = opener
        self._slots: dict[int, _Slot] = {}
        self._running = 0
        self._room = trio.Event()

    async def run(self) -> None:
        """Take jobs and do them."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow_devices)
                while True:
                    while self._running >= JOBS_MAX:
                        self._room = trio.Event()
                        await self._room.wait()
                    limit = min(_TAKE_MAX, JOBS_MAX - self._running)
                    try:
                        jobs = await self._client.take(limit, _TAKE_WAIT_S)
                    except HsfsError as error:
                        log.debug("no jobs", why=str(error))
                        await trio.sleep(0.5)
                        continue
                    for job in jobs:
                        self._running += 1
                        nursery.start_soon(self._work, job)
        finally:
            with trio.move_on_after(2.0) as scope:
                scope.shield = True
                for slot in self._slots.values():
                    if slot.backend is not None:
                        await _close(slot.backend)

    # --- jobs --------------------------------------------------------------------------------

    async def _work(self, job: Job) -> None:
        try:
            await self._finish(job)
        finally:
            self._running -= 1
            self._room.set()

    async def _finish(self, job: Job) -> None:
        try:
            outcome = await self._do(job)
        except LeaseLost:
            return
        except HsfsError as error:
            outcome = Outcome(fault_of(error))
        except Exception as error:
            log.exception("a job failed", kind=job.kind.name, device=job.device)
            outcome = Outcome(Fault("Unavailable", "mover", f"internal error: {error!r}"))
        try:
            await self._client.finish(job, outcome)
        except LeaseLost:
            log.debug("a job had been given away", kind=job.kind.name)
        except HsfsError as error:
            log.warning("an outcome was not delivered", kind=job.kind.name, why=str(error))

    async def _do(self, job: Job) -> Outcome:
        backend, timeout_s = await self._backend(job.device)
        if job.kind is JobKind.LIST:
            delivery = Delivery(self._client, job, gather=False)
            await survey(backend, job.places[0], delivery, timeout_s=timeout_s)
            await delivery.drain()
            return Outcome()
        if job.kind is JobKind.STAT:
            return Outcome(stats=await _stats(backend, job.places, timeout_s))
        if job.kind is JobKind.PROBE:
            with trio.move_on_after(timeout_s):
                return Outcome(space=await backend.probe())
            raise TimedOut(f"device {job.device}", f"no answer for {timeout_s:.0f} s")
        await scan(
            backend,
            job.cursor,
            Delivery(self._client, job, gather=True),
            timeout_s=timeout_s,
        )
        return Outcome()

    # --- backends ----------------------------------------------------------------------------

    async def _backend(self, ident: int) -> tuple[Backend, float]:
        slot = self._slots.get(ident)
        if slot is None:
            await self._learn_devices()
            slot = self._slots.get(ident)
            if slot is None:
                raise NotFound(f"device {ident}", "the metadata server does not name it")
        asked_s = trio.current_time()
        async with slot.opening:
            if slot.backend is None:
                # Those who waited while an attempt failed share its failure.
                if slot.failure is not None and slot.failed_s >= asked_s:
                    raise slot.failure
                await self._open(slot)
            assert slot.backend is not None
            return slot.backend, _timeout_s(slot.device) + _SLACK_S

    async def _open(self, slot: _Slot) -> None:
        device = slot.device
        try:
            with trio.move_on_after(_timeout_s(device) + _SLACK_S):
                slot.backend = await self._opener(DeviceId(device.id), device.url, device.options)
            if slot.backend is None:
                raise TimedOut(device.name, "can't be opened in time")
        except HsfsError as error:
            slot.failure, slot.failed_s = error, trio.current_time()
            raise
        except Exception as error:
            log.exception("backend can't be opened", backend=device.name)
            slot.failure = Unavailable(device.name, f"can't be opened: {error!r}")
            slot.failed_s = trio.current_time()
            raise slot.failure from error

    async def _learn_devices(self) -> None:
        for device in await self._client.devices():
            slot = self._slots.get(device.id)
            if slot is None:
                self._slots[device.id] = _Slot(device)
            elif (slot.device.url, slot.device.options) != (device.url, device.options):
                self._slots[device.id] = _Slot(device)
                if slot.backend is not None:
                    await _close(slot.backend)

    async def _follow_devices(self) -> None:
        while True:
            try:
                await self._learn_devices()
            except HsfsError as error:
                log.debug("no word of the devices", why=str(error))
            await trio.sleep(_DEVICES_EVERY_S)


async def _stats(
    backend: Backend, places: tuple[Place, ...], timeout_s: float
) -> tuple[StatResult, ...]:
    results: list[StatResult] = [StatResult(None)] * len(places)
    limiter = trio.CapacityLimiter(_STATS_AT_ONCE)

    async def one(index: int, place: Place) -> None:
        async with limiter:
            try:
                with trio.move_on_after(timeout_s):
                    results[index] = StatResult(await backend.stat(place))
                    return
                error: HsfsError = TimedOut("stat", f"no answer for {timeout_s:.0f} s")
            except HsfsError as failed:
                error = failed
            results[index] = StatResult(None, fault_of(error))

    if len(places) == 1:
        await one(0, places[0])
    else:
        async with trio.open_nursery() as nursery:
            for index, place in enumerate(places):
                nursery.start_soon(one, index, place)
    return tuple(results)


async def _close(backend: Backend) -> None:
    try:
        await backend.aclose()
    except HsfsError as error:
        log.debug("backend did not close well", why=str(error))


def fault_of(error: HsfsError) -> Fault:
    """The error as a value."""
    return Fault(error.code, error.what[:2000], error.why[:2000], error.next_step[:2000])


def _timeout_s(device: Device) -> float:
    value = device.options.get("timeout", 30.0)
    return float(value) if isinstance(value, int | float) else 30.0
