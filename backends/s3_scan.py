"""Listings in byte order, page by page, whatever the order of the server.

A good server lists keys in byte order. A server that keeps a tree lists a directory `x/` where its
name `x` stands, before `x-1` and `x.json`. One level is put right as it streams: all that comes
later has a name beyond the last one of a page, so that entries up to that name can be given, and
what lies behind it (only a prefix of that very name) waits for the next page. Whole prefixes can't
be put right so: `list_flat` asks once with which kind of server it has to do, and lists a tree
level by level.

Pages are fetched ahead in threads of the lister. A listing that is dropped half-way (break, cancel)
has its fetches interrupted when the iterator is closed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Final

import trio

from hsfs.backends.s3_list import PAGE, ListPage, PageSource
from hsfs.core.errors import Unavailable
from hsfs.core.interruption import Interruption
from hsfs.core.types import Cursor, FileType, ObjectStat, Page, Place

# Place.handle of an object whose key ends in "/", which would else name the prefix.
MARKER: Final = b"object"
_LAST: Final = "\U0010ffff".encode()  # behind every other character of a key
_AHEAD: Final = 2
_AHEAD_MAX: Final = 32  # directories of a walk; above it one per level
_NAMELESS: Final = 1 << 20  # behind the end of any key
_SHARDS: Final = 8
_SHARDS_IN_FLIGHT: Final = 4

Entries = list[ObjectStat]


class _Stream:
    """The pages of one listing, up to `_AHEAD` of them fetched before they are wanted."""

    def __init__(
        self,
        executor: concurrent.futures.Executor,
        fetch: Callable[[bytes, Interruption], tuple[Entries, ListPage]],
    ) -> None:
        self._executor = executor
        self._fetch = fetch
        self._interrupt = Interruption()
        self._lock = threading.Lock()
        self._ready: deque[tuple[Entries, ListPage]] = deque()
        self._wake: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._running = False
        self._token: bytes | None = b""  # None = all pages are here

    def start(self) -> None:
        """Begin to fetch, without waiting."""
        with self._lock:
            self._resume()

    async def next(self) -> tuple[Entries, ListPage] | None:
        """The next page, None behind the last."""
        token = trio.lowlevel.current_trio_token()
        await trio.lowlevel.checkpoint()
        while True:
            with self._lock:
                if self._ready:
                    found = self._ready.popleft()
                    self._resume()
                    return found
                if self._error is not None:
                    raise self._error
                if self._token is None:
                    return None
                self._resume()
                if self._error is not None:
                    raise self._error
                event = trio.Event()
                self._wake = functools.partial(token.run_sync_soon, event.set)
            await event.wait()

    def stop(self) -> None:
        """Interrupt what is in flight; the pages are not wanted any more."""
        with self._lock:
            self._wake = None
        self._interrupt.set()

    def fail(self) -> None:
        """The same for a consumer that still waits: it learns that the backend is closed."""
        self._interrupt.set()
        self._deliver(Unavailable("listing", "the backend is closed"))

    def _resume(self) -> None:
        """Keep one fetch in flight while there is room. Under the lock."""
        if (
            not self._running
            and self._token is not None
            and self._error is None
            and len(self._ready) < _AHEAD
        ):
            try:
                self._executor.submit(self._run)
            except RuntimeError:
                self._error = Unavailable("listing", "the backend is closed")
            else:
                self._running = True

    def _run(self) -> None:
        while True:
            with self._lock:
                token = self._token
            try:
                if token is None:
                    return
                entries, page = self._fetch(token, self._interrupt)
            except BaseException as error:
                self._deliver(error)
                return
            with self._lock:
                self._ready.append((entries, page))
                self._token = page.token or None
                self._running = self._token is not None and len(self._ready) < _AHEAD
                wake, self._wake = self._wake, None
                running = self._running
            if wake is not None:
                with contextlib.suppress(trio.RunFinishedError):
                    wake()
            if not running or self._interrupt.interrupted:
                return

    def _deliver(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            self._running = False
            wake, self._wake = self._wake, None
        if wake is not None:
            with contextlib.suppress(trio.RunFinishedError):
                wake()


class _Level:
    """The pages of one level in byte order. `emitted`: the last key that was given before a
    resume, listed again from behind `position`."""

    def __init__(self, stream: _Stream, base: bytes, position: bytes, emitted: bytes) -> None:
        self._stream = stream
        self._base = len(base)
        self._position = position
        self._skip = emitted
        self._given = b""
        self._held: Entries = []
        self._end = False

    async def next(self) -> Page | None:
        """The next page, None behind the last (whose cursor is b"")."""
        while not self._end:
            got = await self._stream.next()
            if got is None:
                return None
            entries, page = got
            if self._held:
                held = {entry.place.key for entry in self._held}
                entries = self._held + [e for e in entries if e.place.key not in held]
                entries.sort(key=_key)
            entries = self._fresh(entries)
            if not page.token:
                self._end = True
                return Page(tuple(entries))
            mark = page.last_key
            if mark[-1:] == b"/":
                mark = mark[:-1]
            mark = mark[self._base :]
            split = len(entries)
            while split and entries[split - 1].place.key > mark:
                split -= 1
            # Whatever waits has to be listed again by one who resumes here.
            self._held = entries[split:]
            if not self._held:
                self._position = page.last_key
            if split:
                self._given = entries[split - 1].place.key
                return Page(tuple(entries[:split]), _pack(self._position, self._given))
        return None

    def _fresh(self, entries: Entries) -> Entries:
        """Without those that were given before (some servers repeat a prefix on the next page)."""
        known = max(self._skip, self._given)
        start = 0
        while start < len(entries) and entries[start].place.key <= known:
            if self._skip < entries[start].place.key < self._given:
                raise Unavailable("listing", "the server lists keys out of order")
            start += 1
        return entries[start:]


class Lister:
    """Lists below `base` (a key prefix, b"" or ending in "/"); places are relative to it."""

    def __init__(self, source: PageSource, base: bytes, *, threads: int) -> None:
        self._source = source
        self._base = base
        self._executor = concurrent.futures.ThreadPoolExecutor(
            threads, thread_name_prefix="hsfs-list"
        )
        self._keeps_tree: bool | None = None  # None = not asked yet
        self._streams: set[_Stream] = set()

    def close(self) -> None:
        """End all listings."""
        for stream in list(self._streams):
            stream.fail()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def level(self, directory: bytes, after: Cursor | None) -> AsyncIterator[Page]:
        """One level, pages in byte order of the keys."""
        position, emitted = _unpack(after)
        stream = self._level_stream(self._base + directory, position, flat=False)
        level = _Level(stream, self._base, position, emitted)
        with self._open(stream):
            while (page := await level.next()) is not None:
                yield page

    async def flat(self, prefix: bytes, after: Cursor | None) -> AsyncIterator[Page]:
        """All objects below a prefix in byte order."""
        if await self._server_keeps_tree(prefix):
            entries: Entries = []
            async with contextlib.aclosing(self._walk(prefix, after or b"")) as runs:
                async for run in runs:
                    entries += run
                    if len(entries) >= PAGE:
                        yield Page(tuple(entries), entries[-1].place.key)
                        entries = []
            yield Page(tuple(entries))
            return
        async with contextlib.aclosing(self._shards(prefix, after or b"")) as pages:
            async for page in pages:
                yield page

    def _level_stream(self, prefix: bytes, start_after: bytes, *, flat: bool) -> _Stream:
        def fetch(token: bytes, interrupt: Interruption) -> tuple[Entries, ListPage]:
            page = self._source.page(
                prefix, interrupt, delimiter=b"/", start_after=start_after, token=token
            )
            return self._level_entries(prefix, page, flat=flat), page

        return _Stream(self._executor, fetch)

    def _level_entries(self, prefix: bytes, page: ListPage, *, flat: bool) -> Entries:
        """Sorted entries. `flat`: as list_flat gives them, nameless and with empty markers."""
        cut, base = _NAMELESS if flat else len(prefix), len(self._base)
        directory, file = FileType.DIRECTORY, FileType.FILE
        entries = [
            ObjectStat(
                o.key[cut:], file, Place(o.key[base:]), o.size, o.mtime_ns, o.mtime_ns, o.version
            )
            for o in page.objects
            if o.key != prefix
        ]
        entries += [ObjectStat(p[cut:-1], directory, Place(p[base:])) for p in page.prefixes]
        entries += [
            ObjectStat(
                b"", file, Place(o.key[base:], MARKER), o.size, o.mtime_ns, o.mtime_ns, o.version
            )
            for o in page.objects
            if o.key == prefix and (o.size or flat)
        ]
        entries.sort(key=_key)
        return entries

    # Whole prefixes.

    async def _server_keeps_tree(self, prefix: bytes) -> bool:
        """Whether the server lists `x/1` before `x-1`. Asks it for what follows `x.` and the last
        character of all: in byte order that is `x/1`, in a tree it is not."""
        if self._keeps_tree is not None:
            return self._keeps_tree
        full = self._base + prefix
        stream = self._level_stream(full, b"", flat=False)
        with self._open(stream):
            got = await stream.next()
        seen = next((p for p in got[1].prefixes if p[len(full) :] != b"/"), None) if got else None
        if seen is None:
            return False  # no directory here that could come too early, as far as one page tells
        name = seen[:-1]

        def ask() -> bool:
            page = self._source.page(name, Interruption(), start_after=name + b"." + _LAST, limit=1)
            return not (page.objects and page.objects[0].key.startswith(seen))

        self._keeps_tree = await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
        return self._keeps_tree

    def _flat_stream(self, prefix: bytes, start_after: bytes) -> _Stream:
        base = len(self._base)

        def fetch(token: bytes, interrupt: Interruption) -> tuple[Entries, ListPage]:
            page = self._source.page(prefix, interrupt, start_after=start_after, token=token)
            file = FileType.FILE
            entries = [
                ObjectStat(
                    b"",
                    file,
                    Place(o.key[base:], MARKER if o.key[-1:] == b"/" else b""),
                    o.size,
                    o.mtime_ns,
                    o.mtime_ns,
                    o.version,
                )
                for o in page.objects
            ]
            return entries, page

        return _Stream(self._executor, fetch)

    async def _shards(self, prefix: bytes, after: bytes) -> AsyncGenerator[Page, None]:
        """Ranges of the key space, some listed at once, given in order."""
        full = self._base + prefix
        bounds = [b for b in await self._boundaries(full) if b > self._base + after]
        starts = [self._base + after if after else b"", *bounds]
        streams: deque[_Stream] = deque()
        opened = 0
        last = b""
        with contextlib.ExitStack() as stack:
            for index in range(len(starts)):
                while opened < min(index + _SHARDS_IN_FLIGHT, len(starts)):
                    stream = self._flat_stream(full, starts[opened])
                    stack.enter_context(self._open(stream))
                    stream.start()
                    streams.append(stream)
                    opened += 1
                stream = streams.popleft()
                end = starts[index + 1][len(self._base) :] if index + 1 < len(starts) else None
                final = False
                while not final:
                    got = await stream.next()
                    if got is None:
                        break
                    entries = got[0]
                    if any(a.place.key >= b.place.key for a, b in itertools.pairwise(entries)) or (
                        entries and last and entries[0].place.key <= last
                    ):
                        self._keeps_tree = True  # next time we know
                        raise Unavailable("listing", "the server lists keys out of order")
                    # A boundary is the start-after of the next shard, which excludes it.
                    if end is not None and entries and entries[-1].place.key > end:
                        entries = [e for e in entries if e.place.key <= end]
                        final = True
                    if entries:
                        last = entries[-1].place.key
                        yield Page(tuple(entries), last)
                stream.stop()
        yield Page(())

    async def _boundaries(self, prefix: bytes) -> Sequence[bytes]:
        """Some keys that divide what lies below a prefix, by the directories of its first page."""
        while True:
            stream = self._level_stream(prefix, b"", flat=False)
            with self._open(stream):
                got = await stream.next()
            if got is None:
                return ()
            page = got[1]
            if len(page.prefixes) == 1 and not page.objects and page.prefixes[0] != prefix:
                prefix = page.prefixes[0]  # everything lies one level deeper
                continue
            step = max(-(-len(page.prefixes) // _SHARDS), 1)
            # Without the slash, as an exclusive start: the directory belongs to what follows.
            return sorted(p[:-1] for p in page.prefixes[step::step])

    async def _walk(self, prefix: bytes, after: bytes) -> AsyncGenerator[Entries, None]:
        """Runs of objects below a prefix, level by level, the next directories fetched ahead."""
        ready: dict[bytes, _Stream] = {}
        live: set[_Stream] = set()

        def open_level(directory: bytes) -> _Stream:
            stream = self._level_stream(self._base + directory, b"", flat=True)
            live.add(stream)
            self._streams.add(stream)
            stream.start()
            return stream

        def close(stream: _Stream) -> None:
            live.discard(stream)
            self._streams.discard(stream)
            stream.stop()

        try:
            branches = [_Branch(open_level(prefix), self._base)]
            while branches:
                branch = branches[-1]
                if branch.at == len(branch.entries):
                    page = await branch.level.next()
                    if page is None:
                        close(branches.pop().stream)
                    else:
                        branch.turn(page, after)
                    continue
                most = _SHARDS if len(ready) < _AHEAD_MAX else 1
                while branch.ahead and branch.opened < most:
                    key = branch.ahead.popleft()
                    ready[key] = open_level(key)
                    branch.opened += 1
                run = branch.run()
                if run:
                    yield run
                    continue
                key = branch.directory()
                stream = ready.pop(key, None)
                if stream is None:
                    stream = open_level(key)
                else:
                    branch.opened -= 1
                branches.append(_Branch(stream, self._base))
        finally:
            for stream in list(live):
                close(stream)

    @contextlib.contextmanager
    def _open(self, stream: _Stream) -> Iterator[None]:
        self._streams.add(stream)
        try:
            yield
        finally:
            self._streams.discard(stream)
            stream.stop()


class _Branch:
    """Where a walk stands in one directory: `entries[at:]` of its page are still to be given.
    `ahead`: directories of the page that are not listed ahead yet; `opened`: how many are."""

    __slots__ = ("_places", "ahead", "at", "entries", "level", "opened", "stream")

    def __init__(self, stream: _Stream, base: bytes) -> None:
        self.stream = stream
        self.level = _Level(stream, base, b"", b"")
        self.entries: Entries = []
        self.at = 0
        self._places: deque[int] = deque()  # of the directories among the entries
        self.ahead: deque[bytes] = deque()
        self.opened = 0

    def turn(self, page: Page, after: bytes) -> None:
        """Go on to the next page, without what can't have a key behind `after`."""
        entries = list(page.entries)
        if after:
            entries = [e for e in entries if _concerns(e, after)]
        self.entries, self.at = entries, 0
        self._places = deque(i for i, e in enumerate(entries) if e.type is FileType.DIRECTORY)
        self.ahead = deque(entries[i].place.key for i in self._places)

    def run(self) -> Entries:
        """The objects up to the next directory."""
        end = self._places[0] if self._places else len(self.entries)
        start, self.at = self.at, end
        return self.entries[start:end]

    def directory(self) -> bytes:
        """The key of the directory that is next."""
        entry = self.entries[self._places.popleft()]
        self.at += 1
        if self.ahead and self.ahead[0] == entry.place.key:
            self.ahead.popleft()
        return entry.place.key


def _key(entry: ObjectStat) -> bytes:
    return entry.place.key


def _concerns(entry: ObjectStat, after: bytes) -> bool:
    """Whether an entry is, or may have below it, a key behind `after`."""
    key = entry.place.key
    return key > after or (entry.type is FileType.DIRECTORY and after.startswith(key))


def _pack(position: bytes, emitted: bytes) -> Cursor:
    return Cursor(len(position).to_bytes(2, "big") + position + emitted)


def _unpack(cursor: Cursor | None) -> tuple[bytes, bytes]:
    """(where to list from, last key that was given)."""
    if not cursor:
        return b"", b""
    size = 2 + int.from_bytes(cursor[:2], "big")
    return cursor[2:size], cursor[size:]
