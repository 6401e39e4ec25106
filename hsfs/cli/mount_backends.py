"""The backends of one mount: opened at the start, tried again in the background until they work.

A backend that can't be reached, refuses us or does not exist costs nothing but its own files: the
mount goes on without it and takes it in when it answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from hsfs.core.errors import (
    HsfsError,
    NotFound,
    TimedOut,
    Unauthorised,
    UsageError,
    from_os_error,
)
from hsfs.core.ports import Backend, Device
from hsfs.core.types import DeviceId

Opener = Callable[[DeviceId, str, Mapping[str, str | int | float | bool]], Awaitable[Backend]]
Reporter = Callable[[DeviceId, str, str], Awaitable[None]]

_log = logging.getLogger(__name__)
_RETRY_FIRST_S = 1.0
_RETRY_MAX_S = 30.0
_CLOSE_S = 2.0

OK = "ok"
UNKNOWN = "unknown"


def state_of(error: HsfsError) -> str:
    """The word of `status` for an error of a backend."""
    if isinstance(error, Unauthorised):
        return "unauthorised"
    if isinstance(error, NotFound | UsageError):
        return "missing"
    return "unreachable"


@dataclass(slots=True)
class Health:
    """What this mount knows of one backend by itself."""

    device: Device
    state: str = UNKNOWN
    why: str = ""
    next_step: str = ""
    since: float = field(default_factory=time.time)

    def line(self) -> str:
        """For a warning: one line."""
        text = f'backend "{self.device.name}" ({self.device.url}) is {self.state}'
        if self.why:
            text += f": {self.why}"
        return f"{text}; {self.next_step}" if self.next_step else text


class MountBackends:
    """See the module. `opened` is what the front reads from; it grows while it runs."""

    def __init__(
        self, opener: Opener, report: Reporter, overrides: Mapping[str, str | int | float | bool]
    ) -> None:
        self._open = opener
        self._report = report
        self._overrides = overrides
        self._health: dict[DeviceId, Health] = {}
        self.opened: dict[DeviceId, Backend] = {}

    def health(self) -> list[Health]:
        """All backends, in the order in which they were named."""
        return list(self._health.values())

    def find(self, device: int) -> Health | None:
        """What is known of one."""
        return self._health.get(DeviceId(device))

    async def start(self, devices: Sequence[Device], deadline_s: float) -> list[Health]:
        """One round over all; those in trouble. Ends within the deadline; what has not answered by
        then counts as unreachable for now."""
        for device in devices:
            self._health.setdefault(DeviceId(device.id), Health(device))
        with trio.move_on_after(deadline_s):
            async with trio.open_nursery() as nursery:
                for health in self._health.values():
                    nursery.start_soon(self._try, health)
        for health in self._health.values():
            if health.state == UNKNOWN:
                self._set(health, TimedOut("", f"no answer within {deadline_s:g} s"))
        return [health for health in self._health.values() if health.state != OK]

    async def keep(self) -> None:
        """Try those in trouble again, each with its own backoff; for ever."""
        async with trio.open_nursery() as nursery:
            for health in self._health.values():
                nursery.start_soon(self._keep_one, health)

    async def _keep_one(self, health: Health) -> None:
        pause_s = _RETRY_FIRST_S
        while True:
            await trio.sleep(pause_s)
            if health.state == OK:
                pause_s = _RETRY_FIRST_S
                continue
            await self._try(health)
            if health.state == OK:
                _log.info("backend %s works again", health.device.name)
            pause_s = min(pause_s * 2, _RETRY_MAX_S)

    async def _try(self, health: Health) -> None:
        device = DeviceId(health.device.id)
        timeout = health.device.options.get("timeout", 30.0)
        timeout_s = float(timeout) if isinstance(timeout, int | float) else 30.0
        try:
            with trio.fail_after(timeout_s + 5):
                backend = self.opened.get(device)
                if backend is None:
                    options = {**health.device.options, **self._overrides_for(health.device)}
                    backend = await self._open(device, health.device.url, options)
                    self.opened[device] = backend
                await backend.probe()
        except HsfsError as e:
            self._set(health, e)
        except trio.TooSlowError:
            self._set(health, TimedOut("", f"no answer within {timeout_s:g} s"))
        except OSError as e:
            self._set(health, from_os_error(e, ""))
        except Exception as e:
            _log.exception("backend %s", health.device.name)
            self._set(health, HsfsError("", f"{type(e).__name__}: {e}"))
        else:
            self._set(health, None)
        with trio.move_on_after(2), suppress(HsfsError):
            await self._report(device, health.state, health.why)

    def _overrides_for(self, device: Device) -> Mapping[str, str | int | float | bool]:
        return self._overrides if device.url.startswith(("s3:", "gs:", "az:")) else {}

    def _set(self, health: Health, error: HsfsError | None) -> None:
        state = OK if error is None else state_of(error)
        if state != health.state:
            health.since = time.time()
        health.state = state
        health.why = "" if error is None else error.why or error.what or error.code
        health.next_step = "" if error is None else error.next_step

    def failed(self, device: int, state: str, why: str) -> None:
        """A read met trouble (or none any more, with state "ok")."""
        health = self.find(device)
        if health is not None and health.state != state:
            health.state, health.why, health.since = state, why, time.time()

    async def aclose(self) -> None:
        """Close all; a backend that hangs is left behind after a moment."""
        with trio.CancelScope(shield=True), trio.move_on_after(_CLOSE_S):
            async with trio.open_nursery() as nursery:
                for backend in self.opened.values():
                    nursery.start_soon(_close, backend)


async def _close(backend: Backend) -> None:
    try:
        await backend.aclose()
    except Exception:
        _log.debug("closing a backend", exc_info=True)
