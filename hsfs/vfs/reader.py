"""Brings bytes: from memory, from Tier 0, else from backends through Tier 0.

Strategy. A read is answered inline when its bytes are there. Otherwise it leaves a `Waiter` and
whoever has the bytes first answers it, from the very thread that fetched them: no thread hands
bytes to another one. Two ways to fetch:

- a small file whole, into memory; its readers are answered, then it is stored. Such files may be
  brought before they are opened (`prefetch`), several per job.
- extents of a large file straight into its cache file by `CachedFile.fill`, in chunks, several at
  a time; waiters are looked at after every piece (<= 1 MiB), not only at the end of a chunk.

When Tier 0 has no room or is lost, reads go around it for a while.

Threads: any. `_lock` guards the tables and the guarded fields of `Content`; it is never held while
something blocks or calls out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from hsfs.core.errors import (
    CacheUnavailable,
    Corrupt,
    HsfsError,
    NoSpace,
    StaleVersion,
    Unavailable,
)
from hsfs.core.placement import plan
from hsfs.core.ports import CachedFile, ChunkStore
from hsfs.core.types import Extent, FileVersion, Ino, Node, Version
from hsfs.vfs.contents import Content, Data, Done, Fetch, Waiter
from hsfs.vfs.counters import Counters
from hsfs.vfs.devices import Devices
from hsfs.vfs.limits import Limits
from hsfs.vfs.pools import Pool
from hsfs.vfs.sources import Sources

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_AROUND_S = 5.0
_LOCAL_THREADS = 4
_BATCH = 8  # small files of one job, while they come fast
_BATCH_S = 0.01


class Reader:
    """See the module."""

    def __init__(
        self,
        *,
        store: ChunkStore,
        devices: Devices,
        sources: Sources,
        limits: Limits,
        counters: Counters,
        on_error: Callable[[BaseException], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._devices = devices
        self._limits = limits
        self._counters = counters
        self._sources = sources
        self._clock = clock
        self._lock = threading.Lock()
        self._contents: dict[int, Content] = {}
        self._held: dict[Content, None] = {}  # least recently fetched first
        self._held_bytes = 0
        self._local = Pool("hsfs-tier0", _LOCAL_THREADS, on_error)

    # -- opening ---------------------------------------------------------------------------------

    def acquire(self, node: Node) -> Content:
        """The content of a file's node, pinned until `release`."""
        attributes = node.attributes
        with self._lock:
            content = self._content(node)
            content.handles += 1
            if content.prefetched:
                content.prefetched = False
                self._counters.siblings_used += 1
            busy = content.loading or content.data is not None or content.cached is not None
        if busy or not attributes.size:
            return content
        cached = self._find(content)
        if cached is None and content.file.size <= self._limits.small_file:
            self._load(content)
        return content

    def release(self, content: Content) -> None:
        """One holder less; the last one unpins the cache file."""
        with self._lock:
            content.handles -= 1
            self._let_go(content)

    def _content(self, node: Node) -> Content:
        ino = node.attributes.ino
        content = self._contents.get(ino)
        if content is not None and content.file.version == node.version and not content.stale:
            return content
        if content is not None and content.held and not content.handles:
            self._unhold(content)
        file = FileVersion(Ino(ino), Version(node.version), node.attributes.size)
        content = Content(file, node.replicas, self._limits.readahead)
        self._contents[ino] = content
        return content

    def _let_go(self, content: Content) -> None:
        """With the lock: forget what nobody holds, waits for, or is likely to open next."""
        if content.handles > 0 or content.loading or content.fetches or content.waiters:
            return
        if content.prefetched and content.held:
            return
        if content.held:
            self._unhold(content)
        if self._contents.get(content.file.ino) is content:
            del self._contents[content.file.ino]
        cached, content.cached = content.cached, None
        if cached is not None:
            cached.release()

    def _find(self, content: Content) -> CachedFile | None:
        if content.around_until > self._clock():
            return None
        try:
            cached = self._store.find(content.file)
        except (CacheUnavailable, Corrupt, NoSpace):
            return None
        if cached is None:
            return None
        with self._lock:
            if content.cached is None:
                content.cached = cached
                content.complete = cached.complete
                return cached
        cached.release()
        return content.cached

    # -- reading ---------------------------------------------------------------------------------

    def read(self, content: Content, offset: int, size: int, done: Done) -> Data | None:
        """Bytes [offset, offset + size), short only at the end of the file, at once; or None, and
        `done` is called later, once, from another thread."""
        end = min(offset + size, content.file.size)
        counters = self._counters
        counters.reads += 1
        content.read = True
        if end <= offset:
            return b""
        data = content.data
        if data is not None:
            counters.cache_hits += 1
            counters.bytes_from_memory += end - offset
            if not offset and end == content.file.size:
                return data
            return memoryview(data)[offset:end]
        cached = content.cached
        if cached is not None:
            found = cached.read_cached(offset, end - offset)
            if found is not None:
                counters.cache_hits += 1
                counters.bytes_from_tier0 += end - offset
                if not content.complete:
                    self._run_ahead(content, offset, end)
                return found
        counters.cache_misses += 1
        self._miss(content, Waiter(offset, end, done))
        return None

    def want(self, content: Content, extent: Extent, done: Done) -> None:
        """Bring an extent into Tier 0; `done` gets b"" or the error."""
        self._miss(content, Waiter(extent.offset, extent.end, done, wants_data=False))

    def _miss(self, content: Content, waiter: Waiter) -> None:
        if content.file.size <= self._limits.small_file:
            with self._lock:
                content.waiters.append(waiter)
                data = content.data
            if data is not None:
                self._settle(content)
            elif content.complete and content.cached is not None:
                self._submit_local(content)
            else:
                self._load(content)
            return
        demand = content.aligned(waiter.offset, waiter.end)
        if content.complete or not content.holes(demand):
            with self._lock:
                content.waiters.append(waiter)
            self._submit_local(content)
            return
        if content.stale:
            waiter.done(StaleVersion("", "the source holds another version now"))
            return
        start = end = 0
        if waiter.wants_data and not waiter.attempts:
            start, end = content.streams.observe(waiter.offset, waiter.end)
        with self._lock:
            content.waiters.append(waiter)
            fetches = self._claim(content, demand)
            later = self._claim(content, content.aligned(start, end)) if end > start else []
        self._submit(fetches, urgent=True)
        self._submit(later, urgent=False)
        if not fetches:
            # Covered by fetches that may have ended in between.
            self._settle(content)

    def _run_ahead(self, content: Content, offset: int, end: int) -> None:
        start, stop = content.streams.observe(offset, end)
        if stop <= start or content.stale:
            return
        with self._lock:
            fetches = self._claim(content, content.aligned(start, stop))
        self._submit(fetches, urgent=False)

    def _claim(self, content: Content, extent: Extent) -> list[Fetch]:
        """With the lock: fetches for what is neither there nor under way."""
        now = self._clock()
        fetches = [
            Fetch(content, part.extent, part.replicas, now)
            for hole in content.unclaimed(extent)
            for part in plan(hole, content.replicas, self._devices)
        ]
        content.fetches.extend(fetches)
        return fetches

    def _submit(self, fetches: Sequence[Fetch], *, urgent: bool) -> None:
        for fetch in fetches:

            def job(fetch: Fetch = fetch) -> None:
                self._fetch(fetch)

            pool = self._sources.pool(fetch.replicas)
            if pool is None or not pool.submit(job, urgent=urgent):
                self._drop_fetch(fetch, Unavailable("", "no backend that holds it is open"))

    def _submit_local(self, content: Content) -> None:
        if not self._local.submit(lambda: self._settle(content)):
            self._fail_all(content, Unavailable("", "the mount is ending"))

    # -- fetching extents of large files ---------------------------------------------------------

    def _fetch(self, fetch: Fetch) -> None:
        content = fetch.content
        error: HsfsError | None = None
        said: HsfsError | None = None  # by the sources, not by Tier 0
        first = True

        def read(offset: int, view: memoryview) -> int:
            nonlocal first, said
            if not first:
                self._settle(content)
            first = False
            try:
                self._sources.read(content, fetch.replicas, offset, view, fetch.since)
            except HsfsError as failure:
                said = failure
                raise
            if content.waiters:
                self._answer_from(content, offset, view)
            return len(view)

        try:
            if content.stale:
                raise StaleVersion("", "the source holds another version now")
            cached = self._create(content)
            for hole in cached.missing(fetch.extent):
                self._sources.announce(fetch.replicas[0], hole)
                cached.fill(hole, read)
        except (NoSpace, CacheUnavailable, Corrupt) as trouble:
            if trouble is said:
                error = trouble
            else:
                # Corrupt: somebody removed or replaced the cache file.
                self._avoid(content, trouble)
        except HsfsError as failure:
            error = failure
        self._drop_fetch(fetch, error)

    def _drop_fetch(self, fetch: Fetch, error: HsfsError | None) -> None:
        content = fetch.content
        with self._lock:
            content.fetches.remove(fetch)
            cached = content.cached
            if not content.fetches and error is None and cached is not None:
                content.complete = cached.complete
        self._settle(content, error, fetch.extent)
        with self._lock:
            self._let_go(content)

    def _create(self, content: Content) -> CachedFile:
        cached = content.cached
        if cached is not None:
            return cached
        with content.guard:
            cached = content.cached
            if cached is None:
                if content.around_until > self._clock():
                    raise CacheUnavailable("", "Tier 0 is in trouble")
                cached = self._store.create(content.file)
                content.complete = cached.complete
                content.cached = cached
        return cached

    def _settle(
        self,
        content: Content,
        error: HsfsError | None = None,
        where: Extent | None = None,
    ) -> None:
        """Answer every waiter that can be answered now; see to those nobody works for."""
        if not content.waiters:
            return
        ready: list[Waiter] = []
        failed: list[Waiter] = []
        around: list[Waiter] = []
        lost: list[Waiter] = []
        go_around = content.around_until > self._clock()
        with self._lock:
            waiting: list[Waiter] = []
            for waiter in content.waiters:
                extent = content.aligned(waiter.offset, waiter.end)
                held = content.data is not None and waiter.wants_data
                holes = () if held else content.holes(extent)
                if not holes:
                    ready.append(waiter)
                elif error is not None and where is not None and _overlap(holes, where):
                    failed.append(waiter)
                elif content.loading or _covered(holes, content.fetches):
                    waiting.append(waiter)
                elif go_around:
                    around.append(waiter)
                else:
                    lost.append(waiter)
            content.waiters = waiting
        for waiter in ready:
            self._answer(content, waiter)
        for waiter in failed:
            assert error is not None
            waiter.done(error)
        for waiter in around:
            self._go_around(content, waiter)
        for waiter in lost:
            self._again(content, waiter, CacheUnavailable("", "its blocks keep vanishing"))

    def _answer_from(self, content: Content, start: int, view: memoryview) -> None:
        """Answer waiters whose bytes have just come, before they are hashed and written."""
        end = start + len(view)
        ready: list[Waiter] = []
        with self._lock:
            waiting: list[Waiter] = []
            for waiter in content.waiters:
                inside = waiter.wants_data and start <= waiter.offset and waiter.end <= end
                (ready if inside else waiting).append(waiter)
            content.waiters = waiting
        for waiter in ready:
            self._counters.bytes_from_backends += waiter.end - waiter.offset
            waiter.done(view[waiter.offset - start : waiter.end - start])

    def _again(self, content: Content, waiter: Waiter, error: HsfsError) -> None:
        """Tier 0 did not give what it said to have: once more, and in the end without it."""
        waiter.attempts += 1
        if waiter.attempts > _ATTEMPTS:
            self._avoid(content, error)
            self._go_around(content, waiter)
        else:
            self._miss(content, waiter)

    def _avoid(self, content: Content, trouble: HsfsError) -> None:
        """Read around Tier 0 for a while."""
        if content.around_until <= self._clock():
            log.info("reading around Tier 0: %s", trouble.why or trouble)
        content.around_until = self._clock() + _AROUND_S

    def _answer(self, content: Content, waiter: Waiter) -> None:
        if not waiter.wants_data:
            waiter.done(b"")
            return
        data = content.data
        counters = self._counters
        if data is not None:
            if content.local:
                counters.bytes_from_tier0 += waiter.end - waiter.offset
            else:
                counters.bytes_from_backends += waiter.end - waiter.offset
            waiter.done(memoryview(data)[waiter.offset : waiter.end])
            return
        cached = content.cached
        if cached is None:
            self._again(content, waiter, CacheUnavailable("", "Tier 0 lost the file"))
            return
        try:
            found = cached.read(waiter.offset, waiter.end - waiter.offset)
        except (Corrupt, CacheUnavailable) as error:
            log.warning("Tier 0: %s", error.why or error)
            content.complete = False
            if isinstance(error, CacheUnavailable):
                content.around_until = self._clock() + _AROUND_S
                self._go_around(content, waiter)
            else:
                self._again(content, waiter, error)
            return
        counters.bytes_from_tier0 += waiter.end - waiter.offset
        waiter.done(found)

    def _go_around(self, content: Content, waiter: Waiter) -> None:
        """Read without the cache."""
        if not waiter.wants_data:
            waiter.done(CacheUnavailable("", "Tier 0 is full or in trouble"))
            return
        since = self._clock()

        def job() -> None:
            size = waiter.end - waiter.offset
            view = memoryview(bytearray(size))
            try:
                self._sources.read(content, content.replicas, waiter.offset, view, since)
            except HsfsError as error:
                waiter.done(error)
                return
            self._counters.read_around += size
            self._counters.bytes_from_backends += size
            waiter.done(view)

        parts = plan(Extent(waiter.offset, 1), content.replicas, self._devices)
        pool = self._sources.pool(parts[0].replicas) if parts else None
        if pool is None or not pool.submit(job):
            waiter.done(Unavailable("", "no backend that holds it is open"))

    def _fail_all(self, content: Content, error: HsfsError) -> None:
        with self._lock:
            waiters, content.waiters = content.waiters, []
        for waiter in waiters:
            waiter.done(error)

    # -- whole small files -----------------------------------------------------------------------

    def prefetch(self, nodes: Sequence[Node]) -> int:
        """Bring small files before they are opened; how many were begun."""
        local: list[Content] = []
        remote: dict[int, list[Content]] = {}
        begun = 0
        for node in nodes:
            if not node.replicas or not 0 < node.attributes.size <= self._limits.small_file:
                continue
            with self._lock:
                known = self._contents.get(node.attributes.ino)
                if known is not None and known.file.version == node.version:
                    continue
                content = self._content(node)
                content.prefetched = content.loading = True
            begun += 1
            if self._store.cached_bytes(content.file) >= content.file.size:
                local.append(content)
            else:
                remote.setdefault(node.replicas[0].device, []).append(content)
        self._counters.siblings_fetched += begun
        if local:
            self._submit_batches(self._local, local, _BATCH)
        for device, contents in remote.items():
            # Near sources: few threads, as each more costs switches between them. Far ones: one
            # file per thread, as it is the round trip that costs.
            latency_s = 0.0
            with suppress(Unavailable):
                latency_s = self._devices.state(device).latency_s
            batch = _BATCH if latency_s * _BATCH <= _BATCH_S else max(1, int(_BATCH_S / latency_s))
            self._submit_batches(self._sources.pool(contents[0].replicas), contents, batch)
        return begun

    def _submit_batches(self, pool: Pool | None, contents: list[Content], size: int) -> None:
        since = self._clock()
        for start in range(0, len(contents), size):
            batch = contents[start : start + size]

            def job(batch: list[Content] = batch) -> None:
                for content in batch:
                    self._load_now(content, since)

            if pool is None or not pool.submit(job, urgent=False):
                for content in batch:
                    self._loaded(content, Unavailable("", "no backend that holds it is open"))

    def _load(self, content: Content) -> None:
        """Begin to bring a small file, unless that is under way."""
        with self._lock:
            if content.loading or content.data is not None:
                return
            content.loading = True
        since = self._clock()
        parts = plan(Extent(0, content.file.size), content.replicas, self._devices)
        pool = self._sources.pool(parts[0].replicas) if parts else None
        if pool is None or not pool.submit(lambda: self._load_now(content, since)):
            self._loaded(content, Unavailable("", "no backend that holds it is open"))

    def _load_now(self, content: Content, since: float) -> None:
        size = content.file.size
        try:
            if content.stale:
                raise StaleVersion("", "the source holds another version now")
            data: Data | None = None
            cached = content.cached or self._find(content)
            if cached is not None and cached.complete:
                try:
                    data = cached.read(0, size)
                except (Corrupt, CacheUnavailable) as error:
                    log.warning("Tier 0: %s", error.why or error)
                    content.complete = False
            store = data is None
            if data is None:
                data = bytearray(size)
                self._sources.read(content, content.replicas, 0, memoryview(data), since)
                if content.prefetched:
                    self._counters.siblings_bytes += size
        except HsfsError as error:
            self._loaded(content, error)
            return
        content.local = not store
        content.data = data
        self._settle(content)
        if store:
            self._store_whole(content, data)
        self._loaded(content, None)

    def _store_whole(self, content: Content, data: Data) -> None:
        source = memoryview(data)

        def read(offset: int, view: memoryview) -> int:
            view[:] = source[offset : offset + len(view)]
            return len(view)

        try:
            cached = self._create(content)
            for hole in cached.missing(Extent(0, content.file.size)):
                cached.fill(hole, read)
        except (NoSpace, CacheUnavailable) as trouble:
            if content.around_until <= self._clock():
                log.info("small files are not stored: %s", trouble.why or trouble)
            content.around_until = self._clock() + _AROUND_S
        except HsfsError as error:
            log.warning("a small file was not stored: %s", error.why or error)
        else:
            content.complete = True

    def _loaded(self, content: Content, error: HsfsError | None) -> None:
        with self._lock:
            content.loading = False
            if error is None:
                self._hold(content)
                # A held file nobody has open needs no pinned cache file beside it.
                if not content.handles and content.cached is not None:
                    content.cached.release()
                    content.cached = None
            else:
                content.prefetched = False
        if error is not None:
            self._settle(content, error, Extent(0, content.file.size))
        else:
            self._settle(content)
        with self._lock:
            self._let_go(content)

    def _hold(self, content: Content) -> None:
        """With the lock: keep a small file's bytes within the bound, dropping the oldest."""
        if not content.held:
            content.held = True
            self._held[content] = None
            self._held_bytes += content.file.size
        while self._held_bytes > self._limits.held:
            oldest = next(iter(self._held))
            self._unhold(oldest)
            self._let_go(oldest)
            if oldest is content:
                break

    def _unhold(self, content: Content) -> None:
        del self._held[content]
        content.held = False
        content.data = None
        self._held_bytes -= content.file.size
        if content.prefetched:
            content.prefetched = False
            self._counters.siblings_unused += 1

    # -- the rest --------------------------------------------------------------------------------

    def holds(self, ino: int) -> bool:
        """Whether a content of the inode is in use."""
        return ino in self._contents

    def usage(self) -> dict[str, int]:
        """Gauges: what is in use now."""
        with self._lock:
            contents = list(self._contents.values())
            return {
                "open_contents": len(contents),
                "held_files": len(self._held),
                "held_bytes": self._held_bytes,
                "fetches": sum(len(content.fetches) + content.loading for content in contents),
                "waiters": sum(len(content.waiters) for content in contents),
            }

    def drop_held(self) -> None:
        """Forget small files that nobody has open."""
        with self._lock:
            for content in list(self._held):
                self._unhold(content)
                self._let_go(content)

    def close(self) -> None:
        """Interrupt what runs, forget what waits; readers get an error or nothing at all."""
        with self._lock:
            contents = list(self._contents.values())
        self._local.close()
        self._sources.close()
        for content in contents:
            self._fail_all(content, Unavailable("", "the mount is ending"))


def _overlap(holes: Sequence[Extent], where: Extent) -> bool:
    return any(hole.offset < where.end and where.offset < hole.end for hole in holes)


def _covered(holes: Sequence[Extent], fetches: Sequence[Fetch]) -> bool:
    """Whether fetches under way bring all the holes."""
    for hole in holes:
        position = hole.offset
        for fetch in sorted(fetches, key=lambda fetch: fetch.extent.offset):
            if fetch.extent.offset <= position < fetch.extent.end:
                position = fetch.extent.end
        if position < hole.end:
            return False
    return True
