"""The namespace: answers from the store, asks the sources when an answer is due, says what changed.

Every answer is read from one snapshot in one step of the loop. Before that, what is due at its
sources is renewed: a name through the listing of its directory, which renews all of it, or by a
single stat where the directory is so large that this is cheaper. A directory that was never listed
is listed at its first use; what its listing has reached is shown while it goes on.

No backend I/O here: a Surveyor asks. All changes go through the Committer.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, cast

from hsfs.core.clock import Clock, SystemClock
from hsfs.core.errors import NotFound, Unauthorised, Unavailable
from hsfs.core.ports import Device, Invalidation, Listing
from hsfs.core.types import (
    ROOT_INO,
    DeviceId,
    DirectoryPage,
    Entry,
    FileType,
    Info,
    Ino,
    Name,
    Node,
    Replica,
    Space,
    Version,
)
from hsfs.mdserver import journal
from hsfs.mdserver.assimilate import assimilate
from hsfs.mdserver.due import FOR_EVER_NS, Answer, Due, Judge
from hsfs.mdserver.freshness import WEAK_NS, frontier, known_since, safe_name, ttl_s
from hsfs.mdserver.reaper import reap
from hsfs.mdserver.renewal import Renewal
from hsfs.mdserver.schema import (
    EPOCH_KEY,
    FLAG_PIECE,
    FLAG_WEAK,
    SCHEMA_KEY,
    SYNTHETIC,
    UUID_KEY,
    Inode,
    check_schema,
    own_key,
    schema_value,
)
from hsfs.mdserver.store import Changes, MetadataStore, Snapshot
from hsfs.mdserver.store.committer import Committer
from hsfs.mdserver.surveyor import Surveyor
from hsfs.mdserver.tree import View
from hsfs.mdserver.volume import BackendDefinition, Defaults, DeviceFacts, Volume, load_devices

__all__ = ["BackendDefinition", "Namespace", "NamespaceOperations", "Surveyor", "VolumeDefinition"]

log = logging.getLogger(__name__)

PAGE_MAX = 256  # entries per answer
STALE_TTL_S = 1.0
REAP_EVERY_S = 5.0
_REFRESH_AT_ONCE = 8  # directories
_DIRECTORY = int(FileType.DIRECTORY)


class VolumeDefinition(Protocol):
    """What a volume file or a command line says."""

    @property
    def backends(self) -> Sequence[BackendDefinition]: ...


class NamespaceOperations(Protocol):
    """What `Namespace` offers to the server's operations.

    The answer of a call belongs to `seq` when that is read with no await in between.
    """

    @property
    def seq(self) -> int:
        """Journal position: answers read now hold all records up to it (perhaps more)."""

    @property
    def epoch(self) -> int:
        """Grows with every start of the server on this store."""

    async def lookup(self, parent: Ino, name: Name) -> Node: ...
    async def getattr(self, ino: Ino) -> Node: ...
    async def list(self, ino: Ino, after: Name, limit: int) -> Listing: ...
    async def revalidate(self, ino: Ino, version: Version) -> Node: ...
    async def refresh(self, ino: Ino, recursive: bool) -> int: ...
    async def apply(self, pages: Sequence[DirectoryPage]) -> int: ...
    async def walk(self, path: bytes) -> Node: ...
    async def info(self, ino: Ino) -> Info: ...
    async def reload(self, backends: Sequence[BackendDefinition]) -> None: ...
    def devices(self) -> Sequence[Device]: ...
    def space(self) -> Space: ...
    def set_state(self, device: DeviceId, state: str, why: str) -> None: ...
    def set_space(self, device: DeviceId, space: Space) -> None: ...
    def set_scan(self, device: DeviceId, state: str, scanned: int) -> None: ...
    def watch(self, after: int) -> AsyncIterator[Sequence[Invalidation]]:
        """Invalidations behind `after`, each with its seq; ends with Trimmed when they are gone."""

    async def remember(self, name: bytes, value: bytes | None) -> None:
        """Keep (None: drop) a small value of the server's own, durably: scan cursors and such."""

    def recall(self, name: bytes) -> bytes | None: ...


class _Closing(Exception):
    """Ends the namespace's tasks."""


class Namespace:
    """The tree of a volume. `async with`; one per store; asyncio. Raises what its calls say, and
    Unavailable, TimedOut, Unauthorised of a backend that has to be asked."""

    def __init__(
        self,
        store: MetadataStore,
        committer: Committer,
        volume: VolumeDefinition,
        surveyor: Surveyor,
        *,
        defaults: Defaults | None = None,
        clock: Clock | None = None,
        lease_s: float = 30.0,
    ) -> None:
        self.lease_s = lease_s
        self.uuid = b""
        self.epoch = 0
        self._store = store
        self._committer = committer
        self._definition = volume
        self._volume = Volume(defaults or Defaults.of_process())
        self._clock = clock or SystemClock()
        self._seq = store.seq
        self._tasks = asyncio.TaskGroup()
        self._judge = Judge(self._volume)
        self._renewal = Renewal(
            store, self._submit, self._volume, self._judge, self._clock, surveyor, self._tasks,
            self._apply_page,
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        self.epoch, self.uuid = cast("tuple[int, bytes]", await self._submit(_begin_epoch))
        await self.reload(self._definition.backends)
        await self._tasks.__aenter__()
        self._tasks.create_task(self._follow())
        self._tasks.create_task(self._reap())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._tasks.__aexit__(_Closing, _Closing(), None)
        except* _Closing:
            pass

    @property
    def seq(self) -> int:
        """Journal position: see NamespaceOperations."""
        return self._seq

    # Questions

    async def lookup(self, parent: Ino, name: Name) -> Node:
        """The node under a name. Raises NotFound, NotADirectory."""
        now_ns = self._clock.time_ns()
        answer, node = self._look_up(parent, name, now_ns)
        if answer.due:
            stale = await self._renewal.renew(answer, now_ns)
            node = self._look_up(parent, name, now_ns, stale)[1]
        if node is None:
            raise NotFound(name.decode("utf-8", "backslashreplace"))
        facts = self._judge.root(node.attributes.ino, now_ns)
        return node if facts is None else await self._with_root(Ino(node.attributes.ino), facts)

    async def getattr(self, ino: Ino) -> Node:
        """The node of an inode. Raises NotFound."""
        now_ns = self._clock.time_ns()
        answer, node = self._attributes(ino, now_ns)
        if answer.due:
            stale = await self._renewal.renew(answer, now_ns)
            node = self._attributes(ino, now_ns, stale)[1]
        facts = self._judge.root(ino, now_ns)
        return node if facts is None else await self._with_root(ino, facts)

    async def _with_root(self, ino: Ino, facts: DeviceFacts) -> Node:
        """The node of a directory that shows a backend's root. Its attributes are waited for the
        first time only: later, a backend that does not answer delays nobody who looks at what is
        around it."""
        with self._view() as view:
            known = view.require(ino).mode >= 0
        asking = self._tasks.create_task(self._renewal.ask_root(facts))
        if not known:
            await asyncio.wait((asking,))
        return self._attributes(ino, self._clock.time_ns())[1]

    async def list(self, ino: Ino, after: Name, limit: int) -> Listing:
        """Entries behind `after` (b"" = from the start): names that begin with an escape come
        last, the others in byte order. An answer with `more` may be shorter than `limit`, never
        empty. Raises NotFound, NotADirectory."""
        limit = max(1, min(limit, PAGE_MAX))
        asked_ns = self._clock.time_ns()
        settled: dict[int, bool] = {}  # by device: was asked; whether what is known has to stand
        while True:
            found = self._page(ino, after, limit, asked_ns, settled)
            if isinstance(found, Listing):
                return found
            outcomes = await asyncio.gather(*(self._renewal.progress(due) for due in found))
            for due, whole in zip(found, outcomes, strict=True):
                if whole is None or whole:
                    settled[due.facts.id] = whole is None

    async def revalidate(self, ino: Ino, version: Version) -> Node:
        """The node as its source has it now; a read met another version than `version`. Raises
        NotFound."""
        now_ns = self._clock.time_ns()
        answer, node = self._attributes(ino, now_ns, force=True)
        if node.version == version or not version:
            await asyncio.gather(*(self._renewal.ask(due, force=True) for due in answer.due))
        return self._attributes(ino, now_ns)[1]

    async def walk(self, path: bytes) -> Node:
        """The node at an absolute path of the mount. Raises NotFound, NotADirectory."""
        node = await self.getattr(ROOT_INO)
        for name in path.split(b"/"):
            if name == b"..":
                node = await self.getattr(Ino(node.parent or ROOT_INO))
            elif name not in (b"", b"."):
                node = await self.lookup(Ino(node.attributes.ino), Name(name))
        return node

    async def refresh(self, ino: Ino, recursive: bool) -> int:
        """Ask the sources about a file, a directory and its entries, or (`recursive`) all below;
        the number of entries seen. Raises NotFound."""
        now_ns = self._clock.time_ns()
        with self._view() as view:
            record = view.require(ino)
            if record.type == _DIRECTORY:
                ino = Ino(view.owner(ino, record)[0])
        if record.type != _DIRECTORY:
            await self.revalidate(ino, Version(b""))
            return 1
        gate = asyncio.Semaphore(_REFRESH_AT_ONCE)

        async def directory(at: int, listed: bool) -> int:
            count = 0
            if listed:
                async with gate:
                    count = await self._renewal.relist(at, now_ns)
            if recursive:
                below = await asyncio.gather(
                    *(directory(child, whole) for child, whole in self._directories(at))
                )
                count += sum(below)
            return count

        return await directory(ino, True)

    async def info(self, ino: Ino) -> Info:
        """All that is known of an inode, from the store alone. Raises NotFound."""
        with self._view() as view:
            record = view.require(ino)
            bindings = []
            for binding in record.bindings:
                facts = self._volume.get(binding.device)
                if facts is None:
                    continue
                place = (
                    view.directory_place(facts, ino, record)
                    if record.type == _DIRECTORY
                    else view.place(facts, binding)
                )
                if place is not None:
                    bindings.append(Replica(binding.device, place, record.version))
            node = self._node(view, ino, record, Answer(view.seen_at(record)))
            return Info(view.path(ino), node, tuple(bindings), _losers(view, ino, record))

    def devices(self) -> Sequence[Device]:
        """All backends with their state."""
        return self._volume.devices()

    def space(self) -> Space:
        """What statfs answers."""
        return self._volume.space()

    def recall(self, name: bytes) -> bytes | None:
        """A value that `remember` keeps."""
        with self._store.snapshot() as snapshot:
            return snapshot.get(own_key(name))

    def watch(self, after: int) -> AsyncIterator[Sequence[Invalidation]]:
        """Invalidations behind `after`. Raises Trimmed."""
        return journal.watch(self._store, after)

    # News

    async def apply(self, pages: Sequence[DirectoryPage]) -> int:
        """Merge pages of listings; the number of entries that counted."""
        return sum(await asyncio.gather(*(self._apply_page(page) for page in pages)))

    async def reload(self, backends: Sequence[BackendDefinition]) -> None:
        """Show these backends from now on; those seen before keep their numbers and order. Raises
        ConfigError."""
        now_ns = self._clock.time_ns()
        defaults = self._volume.defaults
        facts = await self._submit(lambda view: load_devices(view, backends, defaults, now_ns))
        self._volume.set_devices(cast("Sequence[DeviceFacts]", facts))

    async def remember(self, name: bytes, value: bytes | None) -> None:
        """Keep a small value durably; None drops it."""
        await self._submit(lambda _: Changes(None, {own_key(name): value}))

    def set_state(self, device: DeviceId, state: str, why: str) -> None:
        """Somebody knows how a backend is: ok | unreachable | unauthorised | missing."""
        facts = self._volume.get(device)
        if facts is None:
            return
        self._volume.set_state(device, state, why, self._clock.time_ns())
        if state == "ok":
            self._renewal.sources.forget_trouble(device)
        else:
            kind = Unauthorised if state == "unauthorised" else Unavailable
            self._renewal.sources.known_trouble(device, kind(f"backend {facts.name}", why))

    def set_space(self, device: DeviceId, space: Space) -> None:
        """What a backend says about room."""
        self._volume.set_space(device, space)

    def set_scan(self, device: DeviceId, state: str, scanned: int) -> None:
        """How far the scan of a backend is."""
        self._volume.set_scan(device, state, scanned)

    # Reading

    def _view(self) -> _Viewing:
        self._seq = self._store.seq  # before the snapshot: it then holds at least that much
        return _Viewing(self._store, self._volume)

    def _look_up(
        self, parent: int, name: bytes, asked_ns: int, stale: bool = False
    ) -> tuple[Answer, Node | None]:
        with self._view() as view:
            record = view.directory(parent)
            owner, owner_record, pieces = view.owner(parent, record)
            candidates = view.candidates(parent, name)
            shown = view.shown(name, candidates, view.devices(owner, owner_record))
            answer = Answer(self._clock.time_ns(), known=shown is not None)
            if SYNTHETIC not in candidates[1::3]:  # what hsfs made is there in any case
                self._judge.name(view, answer, owner, owner_record, (*pieces, name), asked_ns)
            if shown is None:
                return answer, None
            try:
                found = view.require(shown[0])
                if found.flags & FLAG_WEAK and not answer.due:
                    self._judge.inode(view, answer, found, asked_ns)
                return answer, self._node(view, shown[0], found, answer, stale)
            except NotFound:
                return answer, None

    def _attributes(
        self, ino: int, asked_ns: int, stale: bool = False, *, force: bool = False
    ) -> tuple[Answer, Node]:
        with self._view() as view:
            record = view.require(ino)
            answer = Answer(self._clock.time_ns())
            if not any(binding.device == SYNTHETIC for binding in record.bindings):
                self._judge.inode(view, answer, record, asked_ns, force)
            return answer, self._node(view, ino, record, answer, stale)

    def _node(
        self, view: View, ino: int, record: Inode, answer: Answer, stale: bool = False
    ) -> Node:
        fresh_ns = answer.fresh_ns
        if record.flags & FLAG_WEAK:
            fresh_ns = min(fresh_ns, WEAK_NS)
        left_s = ttl_s(answer.since_ns, self._clock.time_ns(), fresh_ns, self.lease_s)
        if record.mode < 0 and self._volume.describer(ino) is not None:
            left_s = 0.0  # its backend has not been heard yet: to be asked for by itself
        if stale:
            return view.node(ino, record, answer.since_ns, max(left_s, STALE_TTL_S), True)
        return view.node(ino, record, answer.since_ns, left_s)

    def _page(
        self, ino: int, after: bytes, limit: int, asked_ns: int, settled: dict[int, bool]
    ) -> Listing | Sequence[Due]:
        """A page of a directory, or what has to make progress before there is one."""
        with self._view() as view:
            record = view.directory(ino)
            owner, owner_record, pieces = view.owner(ino, record)
            answer = Answer(self._clock.time_ns(), FOR_EVER_NS)
            waiting: list[Due] = []
            bounds: list[bytes] = []
            for binding in owner_record.bindings:
                facts = self._volume.get(binding.device)
                if facts is None:
                    continue
                place = view.directory_place(facts, owner, owner_record)
                if place is None:
                    continue
                coverage = view.coverage(owner, facts.id)
                # Later pages of one readdir take what its first page has waited for.
                anything = bool(after) or facts.id in settled
                need_ns = 1 if anything else max(1, asked_ns - facts.freshness_ns)
                reached = frontier(coverage, need_ns)
                if reached == b"" or facts.id in settled:
                    since_ns = coverage.as_of_ns if coverage is not None else asked_ns
                    answer.bound(since_ns or asked_ns, facts.freshness_ns)
                    continue
                listed = coverage is not None and coverage.as_of_ns > 0
                entries = coverage.entries if coverage is not None and listed else None
                since_ns = max(1, asked_ns - facts.freshness_ns)
                waiting.append(Due(facts, owner, place, (), (), entries, since_ns))
                bounds.append(b"" if reached is None or pieces else safe_name(reached, facts.flat))
                answer.bound(known_since(coverage, reached or b""), facts.freshness_ns)
            if waiting and (not all(bounds) or after.startswith(b"%~")):
                return waiting
            devices = view.devices(owner, owner_record)
            entries_out: list[Entry] = []
            more = bool(waiting)
            stale = any(settled.values())
            for name, child in view.children(ino, after, min(bounds, default=b""), devices):
                if len(entries_out) == limit:
                    more = True
                    break
                found = view.inode(child)
                if found is None or not found.bindings:
                    continue
                try:
                    node = self._node(view, child, found, answer, stale)
                except NotFound:
                    continue
                entries_out.append(Entry(name, node))
            if waiting and not entries_out:
                return waiting
            return Listing(tuple(entries_out), more, record.change)

    def _directories(self, directory: int) -> Sequence[tuple[int, bool]]:
        """The directories in a directory, and whether they are listed by themselves (`%~+` pieces
        are not)."""
        with self._view() as view:
            record = view.directory(directory)
            owner, owner_record, _ = view.owner(directory, record)
            devices = view.devices(owner, owner_record)
            return [
                (child, not found.flags & FLAG_PIECE)
                for _, child in view.children(directory, b"", b"", devices)
                if (found := view.inode(child)) is not None and found.type == _DIRECTORY
            ]

    # Changing

    async def _submit(self, decide: Callable[[Snapshot], Changes]) -> object:
        return await self._committer.submit(decide)

    async def _apply_page(self, page: DirectoryPage) -> int:
        volume, now_ns = self._volume, self._clock.time_ns()
        count = await self._submit(lambda view: assimilate(view, volume, page, now_ns))
        return max(0, cast("int", count))

    async def _follow(self) -> None:
        """Keep `seq` moving while nobody asks anything."""
        async for records in self._store.watch(self._store.seq):
            self._seq = max(self._seq, records[-1].seq)

    async def _reap(self) -> None:
        """Drop what lost its place, a little at a time."""
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            try:
                while await self._reap_step():
                    pass
            except Exception:
                log.exception("dropping vanished entries failed")

    async def _reap_step(self) -> bool:
        with self._store.snapshot() as snapshot:
            if next(iter(snapshot.range(b"O", b"P")), None) is None:
                return False
        now_ns = self._clock.time_ns()
        return bool(await self._submit(lambda view: reap(view, now_ns)))


class _Viewing:
    """A snapshot as a View, for one `with`."""

    __slots__ = ("_snapshot", "_volume")

    def __init__(self, store: MetadataStore, volume: Volume) -> None:
        self._snapshot = store.snapshot()
        self._volume = volume

    def __enter__(self) -> View:
        return View(self._snapshot.__enter__(), self._volume)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._snapshot.__exit__(kind, error, trace)


def _losers(view: View, ino: int, record: Inode) -> tuple[Replica, ...]:
    """What other backends keep under the same name."""
    found = view.location(record)
    if found is None:
        return ()
    parent, name = found
    out = []
    candidates = view.candidates(parent, name)
    for at in range(1, len(candidates), 3):
        device, other = candidates[at], candidates[at + 1]
        facts = view.volume.get(device)
        loser = view.inode(other)
        if other == ino or facts is None or loser is None:
            continue
        place = view.file_place(facts, loser)
        if place is not None:
            out.append(Replica(device, place, loser.version))
    return tuple(out)


def _begin_epoch(snapshot: Snapshot) -> Changes:
    """A transaction: checks the schema and counts this start of the server."""
    writes: dict[bytes, bytes | None] = {}
    if check_schema(snapshot.get(SCHEMA_KEY)):
        writes[SCHEMA_KEY] = schema_value()
        writes[UUID_KEY] = uuid.uuid4().bytes
    epoch = int.from_bytes(snapshot.get(EPOCH_KEY) or b"", "big") + 1
    writes[EPOCH_KEY] = epoch.to_bytes(8, "big")
    ident = writes.get(UUID_KEY) or snapshot.get(UUID_KEY) or b""
    return Changes((epoch, ident), writes)
