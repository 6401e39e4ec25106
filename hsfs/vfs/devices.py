"""The state of each device as this front meets it: its threads, its health, its pace.

A device that failed is ill for a few seconds: other replicas go first, and jobs that have waited
for longer than its timeout while it made no progress fail at once instead of each waiting out a
deadline of its own behind the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping

from hsfs.core.errors import HsfsError, Throttled, TimedOut, Unauthorised, Unavailable
from hsfs.core.placement import DeviceFacts
from hsfs.core.ports import Backend
from hsfs.core.types import CHUNK_SIZE, DeviceId
from hsfs.vfs.pools import Pool

log = logging.getLogger(__name__)

_ILL_S = 3.0
_SMOOTHING = 0.2
THREADS_MAX = 16


class DeviceState:
    """One device. `timeout_s` and `patient` (`on_timeout = "wait"`) come from its options."""

    __slots__ = (
        "_clock",
        "_ill_until",
        "backend",
        "bytes_per_s",
        "device",
        "latency_s",
        "patient",
        "pool",
        "progress",
        "state",
        "timeout_s",
        "why",
    )

    def __init__(
        self, device: DeviceId, backend: Backend, pool: Pool, clock: Callable[[], float]
    ) -> None:
        self.device = device
        self.backend = backend
        self.pool = pool
        self.timeout_s = 30.0
        self.patient = False
        self.progress = clock()
        self.bytes_per_s = 0.0
        self.latency_s = 0.0  # of small reads
        self.state = "unknown"
        self.why = ""
        self._ill_until = 0.0
        self._clock = clock

    def facts(self) -> DeviceFacts:
        """For the planner."""
        caps = self.backend.caps
        return DeviceFacts(
            healthy=self._ill_until <= self._clock(),
            in_flight=self.pool.load,
            concurrency=max(1, caps.concurrency),
            read_max=caps.read_max or CHUNK_SIZE,
            bytes_per_s=self.bytes_per_s,
        )

    def check(self, since: float) -> None:
        """Raises TimedOut when a job that waits since then has no hope."""
        if self.patient or self.progress >= since:
            return
        if self._clock() - since > self.timeout_s:
            raise TimedOut("", f"the backend made no progress for {self.timeout_s:.0f} s")

    def succeeded(self, count: int, seconds: float) -> bool:
        """A read of `count` bytes came; whether the state changed."""
        self.progress = self._clock()
        if count >= 1 << 18 and seconds > 0:
            pace = count / seconds
            if self.bytes_per_s:
                self.bytes_per_s += (pace - self.bytes_per_s) * _SMOOTHING
            else:
                self.bytes_per_s = pace
        else:
            self.latency_s += (seconds - self.latency_s) * _SMOOTHING
        if self.state == "ok":
            return False
        self.state = "ok"
        self.why = ""
        self._ill_until = 0.0
        return True

    def failed(self, error: HsfsError) -> bool:
        """A read failed for a reason that lies with the device; whether the state changed."""
        if isinstance(error, Throttled):
            self._ill_until = self._clock() + max(error.retry_after_s, 0.5)
            return False
        self._ill_until = self._clock() + _ILL_S
        state = "unauthorised" if isinstance(error, Unauthorised) else "unreachable"
        self.why = error.why or str(error)
        if self.state == state:
            return False
        self.state = state
        return True


class Devices(Mapping[DeviceId, DeviceFacts]):
    """All devices; as a mapping it is what the planner asks for. `backends` may change under us:
    a backend that could not be opened appears once it could."""

    def __init__(
        self,
        backends: Mapping[DeviceId, Backend],
        clock: Callable[[], float],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._backends = backends
        self._clock = clock
        self._on_error = on_error
        self._states: dict[int, DeviceState] = {}
        self._options: dict[int, tuple[float, bool]] = {}
        self._lock = threading.Lock()

    def __getitem__(self, device: DeviceId) -> DeviceFacts:
        return self.state(device).facts()

    def get(self, device: DeviceId, default: DeviceFacts | None = None) -> DeviceFacts | None:  # type: ignore[override]
        """Facts of a device that is open, else `default`."""
        try:
            return self.state(device).facts()
        except Unavailable:
            return default

    def __iter__(self) -> Iterator[DeviceId]:
        return iter(self._backends)

    def __len__(self) -> int:
        return len(self._backends)

    def states(self) -> list[DeviceState]:
        """Devices that were used."""
        return list(self._states.values())

    def configure(self, device: int, timeout_s: float, patient: bool) -> None:
        """What the volume says about a device."""
        self._options[device] = (timeout_s, patient)
        state = self._states.get(device)
        if state is not None:
            state.timeout_s, state.patient = timeout_s, patient

    def state(self, device: int) -> DeviceState:
        """Raises Unavailable while its backend is not open."""
        backend = self._backends.get(DeviceId(device))
        if backend is None:
            raise Unavailable(f"device {device}", "its backend could not be opened yet")
        state = self._states.get(device)
        if state is not None and state.backend is backend:
            return state
        with self._lock:
            state = self._states.get(device)
            if state is None:
                size = max(2, min(THREADS_MAX, backend.caps.concurrency or 8))
                pool = Pool(f"hsfs-device{device}", size, self._on_error)
                state = DeviceState(DeviceId(device), backend, pool, self._clock)
                if device in self._options:
                    state.timeout_s, state.patient = self._options[device]
                self._states[device] = state
            state.backend = backend  # reopened
        return state

    def close(self) -> None:
        """Forget what waits; running reads are ended by their interrupt."""
        for state in self.states():
            state.pool.close()
