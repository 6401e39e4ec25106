"""The file system that fronts serve: names, attributes and files over one metadata server, one
Tier 0 and the backends. Own types in, `HsfsError` out.

Methods ending in `_now`, `Files.read` and `Files.release` return at once and may be called from any
thread; everything `async` belongs to the event loop that `run` runs on. A front calls the former
first and goes to the loop only when they answer None, which is what makes a warm operation cheap.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import trio

from hsfs.core.errors import HsfsError, Interrupted, TimedOut, Unavailable
from hsfs.core.ports import Backend, ChunkStore, Device, Invalidation, Mds
from hsfs.core.types import CHUNK_SIZE, DeviceId, Extent, FileType, Ino, Node, Version
from hsfs.core.units import parse_duration
from hsfs.vfs.attrs import Attrs
from hsfs.vfs.contents import Data
from hsfs.vfs.counters import Counters
from hsfs.vfs.devices import Devices, DeviceState
from hsfs.vfs.files import Files
from hsfs.vfs.inodes import Inodes
from hsfs.vfs.limits import Limits
from hsfs.vfs.names import Names
from hsfs.vfs.reader import Reader
from hsfs.vfs.siblings import Siblings
from hsfs.vfs.sources import Sources

log = logging.getLogger(__name__)

# Tells a front's kernel that an inode (name b"") or a name of a directory changed; must not block.
Sink = Callable[[int, bytes], None]

_REVALIDATE_S = 60.0
_WARM_FILES = 16
_WARM_CHUNKS = 8


@dataclass(slots=True)
class Warmed:
    """What a warm-up did so far: files and bytes that are in Tier 0 now, files that failed."""

    files: int = 0
    bytes: int = 0
    failed: int = 0


class Vfs:
    """See the module. `backends` may grow while the mount lives; `clock` is monotonic seconds."""

    def __init__(
        self,
        *,
        mds: Mds,
        store: ChunkStore,
        backends: Mapping[DeviceId, Backend],
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or Limits()
        self.counters = Counters()
        self.known_devices: dict[int, Device] = {}
        self._mds = mds
        self._store = store
        self._backends = backends
        self._devices = Devices(backends, clock, self._broken)
        self.inodes = Inodes(self.limits.nodes, self.limits.negative_ttl_s, clock)
        self.names = Names(mds, self.inodes, self.counters, clock)
        self.attrs = Attrs(mds, store, self.inodes, self.names, self.known_devices, clock)
        self._reader = Reader(
            store=store,
            devices=self._devices,
            sources=Sources(
                devices=self._devices,
                counters=self.counters,
                revalidate=self._revalidate_blocking,
                on_health=self._report_soon,
                clock=clock,
            ),
            limits=self.limits,
            counters=self.counters,
            on_error=self._broken,
            clock=clock,
        )
        self.files = Files(
            self.names,
            self.attrs,
            self.inodes,
            self._reader,
            Siblings(self.limits.siblings, self.counters, self.inodes.next_run),
            self.limits,
            self._load_soon,
        )
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._sink: Sink | None = None
        self._ending = threading.Event()

    # -- life ------------------------------------------------------------------------------------

    async def run(
        self,
        sink: Sink | None = None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Apply up-calls until cancelled; `started` once operations may begin."""
        self._sink = sink
        self._token = trio.lowlevel.current_trio_token()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = self.names.nursery = nursery
                nursery.start_soon(self._learn_devices)
                nursery.start_soon(self._apply)
                task_status.started()
        finally:
            self._nursery = self.names.nursery = None
            self.close()

    def close(self) -> None:
        """End blocking reads and fail what waits; thread-safe, idempotent."""
        self._ending.set()
        self._token = None
        self._reader.close()

    async def _apply(self) -> None:
        stream: AsyncIterator[Sequence[Invalidation]] = self._mds.invalidations()
        if hasattr(stream, "aclose"):
            async with aclosing(stream):  # type: ignore[type-var]
                async for batch in stream:
                    self.apply(batch)
        else:
            async for batch in stream:
                self.apply(batch)

    def apply(self, batch: Sequence[Invalidation]) -> None:
        """Up-calls: our own knowledge first, then the front's kernel."""
        sink = self._sink
        for change in batch:
            if not change.ino:
                told = self.inodes.known_names(10_000)
                self.inodes.invalidate_all()
                if sink is not None:
                    for parent, name in told:
                        sink(parent, name)
            elif change.name:
                self.inodes.invalidate_entry(change.ino, change.name)
                if sink is not None:
                    sink(change.ino, change.name)
            else:
                self.inodes.invalidate(change.ino)
                if sink is not None and self.inodes.known(change.ino):
                    sink(change.ino, b"")

    async def _learn_devices(self) -> None:
        while True:
            try:
                devices = await self._mds.devices()
            except HsfsError:
                await trio.sleep(2.0)
                continue
            for device in devices:
                self.known_devices[device.id] = device
                self._configure(device)
            await trio.sleep(30.0)

    def _configure(self, device: Device) -> None:
        timeout = device.options.get("timeout", 30.0)
        try:
            timeout_s = parse_duration(timeout) if isinstance(timeout, str) else float(timeout)
        except (HsfsError, ValueError):
            timeout_s = 30.0
        patient = device.options.get("on_timeout") == "wait"
        self._devices.configure(device.id, timeout_s, patient)

    def activity(self) -> int:
        """A number that stands still while nobody uses the front."""
        counters = self.counters
        return counters.reads + counters.node_hits + counters.node_misses

    def tidy(self) -> int:
        """For a front that is idle: drop what has expired and what was brought for readers that
        did not come (Tier 0 has it), pack the rest; how much that was."""
        held = self._reader.usage()["held_files"]
        self._reader.drop_held()
        return held + self.inodes.settle()

    # -- from worker threads ---------------------------------------------------------------------

    def _soon(self, function: Callable[[], object]) -> bool:
        """Run on the loop if there still is one."""
        token = self._token
        if token is None:
            return False
        try:
            token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    def _load_soon(self, directory: int, after: bytes) -> None:
        self._soon(lambda: self.names.load_soon(directory, after))

    def _report_soon(self, state: DeviceState) -> None:
        device, health, why = state.device, state.state, state.why

        def report() -> None:
            if self._nursery is not None:
                self._nursery.start_soon(self._report, device, health, why)

        self._soon(report)

    async def _report(self, device: DeviceId, state: str, why: str) -> None:
        try:
            await self._mds.report(device, state, why)
        except HsfsError:
            self.counters.errors["report"] += 1

    def _broken(self, error: BaseException) -> None:
        self.counters.errors["bug"] += 1
        log.error("a worker failed", exc_info=error)

    def _revalidate_blocking(self, ino: Ino, version: Version) -> Node:
        ready = threading.Event()
        outcome: list[Node | HsfsError] = []

        async def ask() -> None:
            try:
                outcome.append(await self._revalidate(ino, version))
            except HsfsError as error:
                outcome.append(error)
            finally:
                ready.set()

        def start() -> None:
            if self._nursery is None:
                ready.set()
            else:
                self._nursery.start_soon(ask)

        if not self._soon(start):
            raise Unavailable("", "the mount is ending")
        until = time.monotonic() + _REVALIDATE_S
        while not ready.wait(0.25):
            if self._ending.is_set():
                raise Interrupted("", "the mount is ending")
            if time.monotonic() > until:
                raise TimedOut("", "the metadata server did not answer")
        if not outcome:
            raise Interrupted("", "the mount is ending")
        if isinstance(outcome[0], HsfsError):
            raise outcome[0]
        return outcome[0]

    async def _revalidate(self, ino: Ino, version: Version) -> Node:
        stamp, sent = self.inodes.stamp(), time.monotonic()
        try:
            node = await self._mds.revalidate(ino, version)
        except HsfsError:
            self.inodes.expire(ino)
            raise
        if node.version != version:
            self.inodes.invalidate(ino)
            if self._sink is not None and self.inodes.known(ino):
                self._sink(ino, b"")
        else:
            self.inodes.put(node, sent, stamp)
        return node

    # -- for the control socket ------------------------------------------------------------------

    def stats(self) -> dict[str, object]:
        """Counters and gauges, JSON-ready."""
        result = self.counters.snapshot()
        result["now"] = {
            **self._reader.usage(),
            "handles": len(self.files),
            "inodes": len(self.inodes),
            "held_by_kernel": self.inodes.held_by_kernel,
            "nodes": self.inodes.cached,
        }
        result["devices"] = {
            str(state.device): {
                "state": state.state,
                "why": state.why,
                "bytes_per_s": int(state.bytes_per_s),
                "load": state.pool.load,
            }
            for state in self._devices.states()
        }
        usage = self._store.usage()
        result["tier0"] = {name: getattr(usage, name) for name in usage.__struct_fields__}
        return result

    async def warm(self, path: bytes, progress: Callable[[Warmed], None] | None = None) -> Warmed:
        """Bring a file, or all files below a directory, into Tier 0. Raises NotFound for the path
        itself; single files that fail are counted."""
        warmed = Warmed()
        top = await self.names.resolve(path)
        files = trio.Semaphore(_WARM_FILES)
        chunks = trio.Semaphore(_WARM_CHUNKS)
        stopped: list[HsfsError] = []

        async def one(node: Node) -> None:
            try:
                await self._warm_file(node, chunks)
            except HsfsError as error:
                log.info("warm-up: %s", error.why or error)
                warmed.failed += 1
            else:
                warmed.files += 1
                warmed.bytes += node.attributes.size
            finally:
                files.release()
            if progress is not None:
                progress(warmed)

        async with trio.open_nursery() as nursery:
            try:
                async for node in self._files_below(top):
                    await files.acquire()
                    nursery.start_soon(one, node)
            except HsfsError as error:  # a directory that can't be listed
                stopped.append(error)
        if stopped:
            raise stopped[0]
        return warmed

    async def _warm_file(self, node: Node, chunks: trio.Semaphore) -> None:
        size = node.attributes.size
        if not size or self.attrs.cached_bytes(node) >= size:
            return
        content = self._reader.acquire(node)
        failures: list[HsfsError] = []

        async def one(extent: Extent) -> None:
            try:
                outcome = await _called_back(lambda done: self._reader.want(content, extent, done))
            finally:
                chunks.release()
            if isinstance(outcome, HsfsError):
                failures.append(outcome)

        try:
            async with trio.open_nursery() as nursery:
                for start in range(0, size, CHUNK_SIZE):
                    await chunks.acquire()
                    if failures:
                        chunks.release()
                        break
                    nursery.start_soon(one, Extent(start, min(CHUNK_SIZE, size - start)))
        finally:
            self._reader.release(content)
        if failures:
            raise failures[0]

    async def evict(self, path: bytes) -> int:
        """Drop what Tier 0 holds of a file or of all files below a directory; bytes freed."""
        inos = [Ino(n.attributes.ino) async for n in self._files_below(await self.resolve(path))]
        self._reader.drop_held()
        if not inos:
            return 0
        return await trio.to_thread.run_sync(self._store.evict, inos)

    async def refresh(self, path: bytes) -> int:
        """Ask the source about everything at or below a path; entries seen."""
        node = await self.resolve(path)
        ino = Ino(node.attributes.ino)
        count = await self._mds.refresh(ino, node.attributes.type is FileType.DIRECTORY)
        self.inodes.expire(ino)
        return count

    async def resolve(self, path: bytes) -> Node:
        """The node at a path below the root; see `Names.resolve`."""
        return await self.names.resolve(path)

    async def _files_below(self, top: Node) -> AsyncIterator[Node]:
        waiting = [top]
        while waiting:
            node = waiting.pop()
            if node.attributes.type is FileType.FILE:
                yield node
            if node.attributes.type is not FileType.DIRECTORY:
                continue
            after = b""
            while True:
                page = await self.names.page(Ino(node.attributes.ino), after)
                for below in page.nodes:
                    if below.attributes.type is FileType.FILE:
                        yield below
                    elif below.attributes.type is FileType.DIRECTORY:
                        waiting.append(below)
                if not page.more or not page.names:
                    break
                after = page.names[-1]


async def _called_back(
    start: Callable[[Callable[[Data | HsfsError], None]], None],
) -> Data | HsfsError:
    """Wait on the loop for a callback that comes from a worker thread."""
    event = trio.Event()
    token = trio.lowlevel.current_trio_token()
    result: list[Data | HsfsError] = []

    def done(outcome: Data | HsfsError) -> None:
        result.append(outcome)
        token.run_sync_soon(event.set)

    start(done)
    await event.wait()
    return result[0]
