"""Reads of one extent from the backends that hold a replica of it, with all that can go wrong.

A device that fails is passed over for the next replica; one with `on_timeout = "wait"` is asked
again for ever. A backend that answers with another version makes us ask the metadata server: if the
content did change, the content is marked stale and its readers get StaleVersion, never other bytes.

Everything blocks and belongs to worker threads; each has one `Interruption`, by which `close` ends
it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from hsfs.core.errors import (
    Corrupt,
    HsfsError,
    Interrupted,
    NotFound,
    StaleHandle,
    StaleVersion,
    Throttled,
    Unauthorised,
    Unavailable,
)
from hsfs.core.interruption import Interruption
from hsfs.core.ports import Announcer
from hsfs.core.types import Extent, Ino, Node, Replica, Version
from hsfs.vfs.contents import Content
from hsfs.vfs.counters import Counters
from hsfs.vfs.devices import Devices, DeviceState
from hsfs.vfs.pools import Pool

log = logging.getLogger(__name__)

_PIECE = 1 << 20  # what a cache file's `fill` asks for at a time

Revalidate = Callable[[Ino, Version], Node]


class Sources:
    """See the module. `revalidate` blocks until the source was asked about an inode (raises
    NotFound when it is gone); `on_health` is told of changes of a device's state; both are called
    from worker threads."""

    def __init__(
        self,
        *,
        devices: Devices,
        counters: Counters,
        revalidate: Revalidate,
        on_health: Callable[[DeviceState], None],
        clock: Callable[[], float],
    ) -> None:
        self._devices = devices
        self._counters = counters
        self._revalidate = revalidate
        self._on_health = on_health
        self._clock = clock
        self._lock = threading.Lock()
        self._stops: set[Interruption] = set()
        self._thread = threading.local()
        self._closed = False

    def pool(self, replicas: Sequence[Replica]) -> Pool | None:
        """The threads of the first device of these that is open."""
        for replica in replicas:
            try:
                return self._devices.state(replica.device).pool
            except Unavailable:
                continue
        return None

    def read(
        self,
        content: Content,
        replicas: Sequence[Replica],
        offset: int,
        view: memoryview,
        since: float,
    ) -> None:
        """Fill `view` from the first replica that can; raises the last one's error."""
        pause_s = 0.2
        confirmed = False
        while True:
            error: HsfsError = Unavailable("", "no replica is proven")
            patient = False
            for replica in replicas:
                try:
                    state = self._devices.state(replica.device)
                    self._read_one(state, replica, offset, view, since)
                    return
                except (StaleVersion, StaleHandle, NotFound) as moved:
                    if confirmed:
                        raise StaleVersion("", moved.why or "the source keeps changing") from moved
                    replicas = self._confirm(content, moved)
                    confirmed = True
                    break
                except (Unavailable, Unauthorised) as failure:
                    error = failure
                    patient = patient or self._is_patient(replica)
            else:
                if not patient or isinstance(error, Unauthorised):
                    raise error
                self._pause(pause_s)
                pause_s = min(pause_s * 2, 5.0)
                since = self._clock()

    def announce(self, replica: Replica, extent: Extent) -> None:
        """Tell the backend that it will be asked for all of `extent`, piece by piece."""
        if extent.length <= _PIECE:
            return
        with suppress(Unavailable):
            backend = self._devices.state(replica.device).backend
            if backend.caps.announces:
                cast("Announcer", backend).announce(replica.place, extent)

    def _is_patient(self, replica: Replica) -> bool:
        try:
            return self._devices.state(replica.device).patient
        except Unavailable:
            return False

    def _read_one(
        self, state: DeviceState, replica: Replica, offset: int, view: memoryview, since: float
    ) -> None:
        state.check(since)
        stop = self._stop()
        expect = Version(replica.version) if replica.version else None
        begun = self._clock()
        try:
            try:
                count = state.backend.read_into(
                    replica.place, offset, view, expect=expect, interrupt=stop
                )
            except Corrupt:
                # Once more: a flipped bit on the way is not a broken source.
                count = state.backend.read_into(
                    replica.place, offset, view, expect=expect, interrupt=stop
                )
        except (Unavailable, Unauthorised) as error:
            if stop.interrupted:
                raise Interrupted("", "the mount is ending") from error
            if not isinstance(error, Throttled):
                log.info("device %d: %s", state.device, error.why or error)
            if state.failed(error):
                self._on_health(state)
            raise
        if count != len(view):
            raise StaleVersion("", "the source is shorter than it was")
        self._counters.fetched[state.device] += count
        if state.succeeded(count, self._clock() - begun):
            self._on_health(state)

    def _confirm(self, content: Content, moved: HsfsError) -> Sequence[Replica]:
        """The source did not answer with our version: ask. Returns where to read now; raises
        StaleVersion when the content is another one."""
        with content.guard:
            if content.stale:
                raise StaleVersion("", "the source holds another version now")
            try:
                node = self._revalidate(content.file.ino, content.file.version)
            except NotFound:
                node = None
            if node is None or node.version != content.file.version:
                self._counters.stale += 1
                content.stale = True
                raise StaleVersion("", moved.why or "the source holds another version now")
            content.replicas = node.replicas
            return tuple(replica for replica in node.replicas if replica.proven)

    def _stop(self) -> Interruption:
        stop: Interruption | None = getattr(self._thread, "stop", None)
        if stop is None:
            stop = self._thread.stop = Interruption()
            with self._lock:
                self._stops.add(stop)
                if self._closed:
                    stop.set()
        return stop

    def _pause(self, seconds: float) -> None:
        stop = self._stop()
        until = self._clock() + seconds
        while self._clock() < until:
            if stop.interrupted:
                raise Interrupted("", "the mount is ending")
            time.sleep(0.05)

    def close(self) -> None:
        """Interrupt what reads now and all that comes later."""
        with self._lock:
            self._closed = True
            stops = list(self._stops)
        self._devices.close()
        for stop in stops:
            stop.set()
