"""Assimilation: one scan per backend, driven through the job board, resumable.

A scan's cursor and counts are kept in the store, so that neither a killed server nor a killed mover
starts it over. A scan that failed goes on where it was, with growing pauses, for as long as the
server lives; it does not keep an embedded server alive then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from hsfs.core.errors import HsfsError, NotFound
from hsfs.core.ports import Device
from hsfs.core.types import DeviceId, DirectoryPage, Wire
from hsfs.proto.messages import ScanStatus

log = structlog.get_logger("hsfs.mds.scans")

SAVE_S = 2.0
_RETRY_MIN_S = 1.0
_RETRY_MAX_S = 60.0


class Record(Wire, frozen=True, array_like=True, gc=False):
    """What the store keeps of a backend's scan. `total`: entries of the last whole scan."""

    version: int
    state: str  # running | done | failed
    cursor: bytes = b""
    entries: int = 0
    directories: int = 0
    elapsed_s: float = 0.0
    total: int = 0


class ScanStore(Protocol):
    """What scans need of the namespace."""

    def devices(self) -> Sequence[Device]: ...
    async def apply(self, pages: Sequence[DirectoryPage]) -> int: ...
    def set_scan(self, device: DeviceId, state: str, scanned: int) -> None: ...
    async def remember(self, name: bytes, value: bytes | None) -> None: ...
    def recall(self, name: bytes) -> bytes | None: ...


class Scanner(Protocol):
    """What scans need of the job board."""

    async def scan(
        self,
        device: DeviceId,
        cursor: bytes,
        sink: Callable[[Sequence[DirectoryPage], bytes], Awaitable[None]],
        waiting: Callable[[], None],
    ) -> None: ...


_decode = msgspec.msgpack.Decoder(Record).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Scan:
    task: asyncio.Task[None]
    record: Record
    began_s: float  # of this process's part of it
    before_s: float  # spent by earlier parts
    before: int  # entries of earlier parts
    why: str = ""


class Scans:
    """All scans of a server. Use with a running loop; `aclose` at the end."""

    def __init__(self, store: ScanStore, scanner: Scanner) -> None:
        self._store = store
        self._scanner = scanner
        self._scans: dict[str, _Scan] = {}

    def start_due(self) -> None:
        """Go on with unfinished scans, and begin those of backends with `scan = "full"` that were
        never scanned."""
        for device in self._store.devices():
            record = self._record(device)
            if record is not None and record.state == "done":
                self._store.set_scan(DeviceId(device.id), "done", record.total)
            elif record is not None or device.options.get("scan", "full") == "full":
                self._begin(device, record)
            else:
                self._store.set_scan(DeviceId(device.id), "lazy", 0)

    def start(self, names: Sequence[str], *, restart: bool) -> None:
        """Scan the named backends (all when empty). One under way goes on unless `restart`.

        Raises NotFound.
        """
        devices = {device.name: device for device in self._store.devices()}
        for name in names:
            if name not in devices:
                raise NotFound(f"backend {name}", "the volume has none of this name")
        for name in names or list(devices):
            scan = self._scans.get(name)
            running = scan is not None and not scan.task.done()
            if running and not restart:
                continue
            if scan is not None and running:
                scan.task.cancel()
            record = self._record(devices[name])
            if record is not None and (restart or record.state == "done"):
                record = Record(1, "running", total=record.total)
            self._begin(devices[name], record)

    def status(self) -> tuple[ScanStatus, ...]:
        """Where every backend's scan stands."""
        return tuple(self._status(device) for device in self._store.devices())

    def pending(self) -> bool:
        """Whether a scan is under way and not in trouble."""
        return any(not scan.task.done() and not scan.why for scan in self._scans.values())

    async def aclose(self) -> None:
        """Stop; what was reached is kept."""
        tasks = [scan.task for scan in self._scans.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- inside ------------------------------------------------------------------------------

    def _key(self, device: Device) -> bytes:
        return f"scan.{device.id}".encode()

    def _record(self, device: Device) -> Record | None:
        value = self._store.recall(self._key(device))
        return None if value is None else _decode(value)

    def _begin(self, device: Device, record: Record | None) -> None:
        record = record or Record(1, "running")
        task = asyncio.get_running_loop().create_task(self._keep(device))
        self._scans[device.name] = _Scan(
            task, record, time.monotonic(), record.elapsed_s, record.entries
        )
        self._store.set_scan(DeviceId(device.id), "running", record.entries)

    async def _keep(self, device: Device) -> None:
        """Scan until it is done."""
        scan = self._scans[device.name]
        pause_s = _RETRY_MIN_S
        while True:
            reached = scan.record.cursor
            try:
                await self._once(device, scan)
                return
            except HsfsError as error:
                scan.why = str(error)
                log.warning("a scan has to wait", backend=device.name, why=scan.why)
            self._store.set_scan(DeviceId(device.id), "failed", scan.record.entries)
            await self._save(device, scan, "failed")
            if scan.record.cursor != reached:
                pause_s = _RETRY_MIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(_RETRY_MAX_S, pause_s * 2)

    async def _once(self, device: Device, scan: _Scan) -> None:
        saved_s = time.monotonic()

        async def sink(pages: Sequence[DirectoryPage], cursor: bytes) -> None:
            nonlocal saved_s
            await self._store.apply(pages)
            scan.why = ""
            record = scan.record
            scan.record = Record(
                1,
                "running",
                cursor or record.cursor,
                record.entries + sum(len(p.entries) for p in pages if not p.names_only),
                record.directories + sum(p.upto == b"" and not p.adds_only for p in pages),
                self._elapsed_s(scan),
                record.total,
            )
            now = time.monotonic()
            if now - saved_s >= SAVE_S:
                saved_s = now
                self._store.set_scan(DeviceId(device.id), "running", scan.record.entries)
                await self._save(device, scan, "running")

        def waiting() -> None:
            scan.why = "no mover is running"

        await self._scanner.scan(DeviceId(device.id), scan.record.cursor, sink, waiting)
        record = scan.record
        scan.record = msgspec.structs.replace(
            record, cursor=b"", total=record.entries, elapsed_s=self._elapsed_s(scan)
        )
        scan.why = ""
        await self._save(device, scan, "done")
        self._store.set_scan(DeviceId(device.id), "done", record.entries)
        log.info("assimilated", backend=device.name, entries=record.entries)

    def _elapsed_s(self, scan: _Scan) -> float:
        return scan.before_s + time.monotonic() - scan.began_s

    async def _save(self, device: Device, scan: _Scan, state: str) -> None:
        scan.record = msgspec.structs.replace(scan.record, state=state)
        await self._store.remember(self._key(device), _encode(scan.record))

    def _status(self, device: Device) -> ScanStatus:
        scan = self._scans.get(device.name)
        if scan is None:
            record = self._record(device)
            if record is None:
                return ScanStatus(device.name, "lazy" if device.scan_state == "lazy" else "")
            return ScanStatus(
                device.name, record.state, record.entries, record.directories, 0.0, record.elapsed_s
            )
        record = scan.record
        state = "running" if not scan.task.done() else record.state
        if scan.why and state == "running":
            state = "failed" if record.state == "failed" else "waiting"
        part_s = max(0.001, time.monotonic() - scan.began_s)
        if scan.task.done():
            part_s = max(0.001, record.elapsed_s - scan.before_s)
        rate = max(0, record.entries - scan.before) / part_s
        elapsed_s = record.elapsed_s if scan.task.done() else scan.before_s + part_s
        eta_s = -1.0
        if state == "running" and record.total > record.entries and rate > 0:
            eta_s = (record.total - record.entries) / rate
        return ScanStatus(
            device.name,
            state,
            record.entries,
            record.directories,
            rate,
            elapsed_s,
            eta_s,
            scan.why,
        )
