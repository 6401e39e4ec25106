"""Whether each backend works, as probes and the ends of jobs tell it.

A backend in trouble is probed often, so that it comes back by itself; a healthy one rarely, for its
space. States: ok | unreachable | unauthorised | missing | unknown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import structlog

from hsfs.core.errors import (
    HsfsError,
    NotADirectory,
    NotFound,
    StaleHandle,
    Unauthorised,
    Unavailable,
)
from hsfs.core.ports import Device
from hsfs.core.types import DeviceId, Space

log = structlog.get_logger("hsfs.mds.health")

WELL_S = 300.0
ILL_S = 5.0


class HealthStore(Protocol):
    """Where states are kept."""

    def devices(self) -> Sequence[Device]: ...
    def set_state(self, device: DeviceId, state: str, why: str) -> None: ...
    def set_space(self, device: DeviceId, space: Space) -> None: ...


class Prober(Protocol):
    """What probes."""

    async def probe(self, device: DeviceId) -> Space: ...


def state_of(error: HsfsError | None, *, root: bool) -> str | None:
    """The state that a job's end proves; None = it says nothing of the backend as a whole.
    `root`: the job was about the backend's root."""
    if error is None:
        return "ok"
    if isinstance(error, Unauthorised):
        return "unauthorised"
    if isinstance(error, Unavailable):
        return "unreachable"
    if root and isinstance(error, NotFound | NotADirectory | StaleHandle):
        return "missing"
    return None


class Health:
    """Keeps the states. Run `run()` beside it."""

    def __init__(self, store: HealthStore) -> None:
        self._store = store
        self._states: dict[int, str] = {}
        self._due_s: dict[int, float] = {}
        self._probing: dict[int, asyncio.Task[None]] = {}

    def heard(self, device: int, error: HsfsError | None, root: bool) -> None:
        """How a job of the device ended."""
        state = state_of(error, root=root)
        if state is None or (state == "ok" and not root and self._states.get(device) == "missing"):
            return
        if state == "ok" and error is None and self._states.get(device) == "ok":
            return
        why = "" if error is None else str(error)
        if self._states.get(device) != state:
            log.warning("backend", device=device, state=state, why=why)
            self._due_s[device] = time.monotonic() + (WELL_S if state == "ok" else ILL_S)
        self._states[device] = state
        self._store.set_state(DeviceId(device), state, why)

    def well(self, device: int) -> bool:
        """Whether nothing speaks against the device."""
        return self._states.get(device, "ok") == "ok"

    async def run(self, prober: Prober) -> None:
        """Probe what is due; until cancelled."""
        try:
            while True:
                now = time.monotonic()
                for device in self._store.devices():
                    if self._due_s.get(device.id, 0.0) <= now and device.id not in self._probing:
                        self._probing[device.id] = asyncio.get_running_loop().create_task(
                            self._probe(prober, device.id)
                        )
                await asyncio.sleep(1.0)
        finally:
            tasks = list(self._probing.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def probe_soon(self, device: int) -> None:
        """Probe the device at the next turn."""
        self._due_s.pop(device, None)

    async def _probe(self, prober: Prober, device: int) -> None:
        try:
            space = await prober.probe(DeviceId(device))
        except HsfsError:
            self._due_s[device] = time.monotonic() + ILL_S  # the job board has said `heard`
        else:
            self._store.set_space(DeviceId(device), space)
            self._due_s[device] = time.monotonic() + WELL_S
        finally:
            self._probing.pop(device, None)
