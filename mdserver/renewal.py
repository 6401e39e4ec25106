"""Renewing what is due: the way from a decision to an answer of the source to the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from hsfs.core.clock import Clock
from hsfs.core.errors import HsfsError, NotFound, StaleHandle, Unauthorised, Unavailable
from hsfs.core.types import DirectoryPage, FileType, ObjectStat, Place
from hsfs.mdserver.assimilate import assimilate_names, assimilate_root
from hsfs.mdserver.due import Answer, Due, Judge
from hsfs.mdserver.freshness import known_since, sort_key
from hsfs.mdserver.revalidation import Revalidation
from hsfs.mdserver.store import Changes, MetadataStore, Snapshot
from hsfs.mdserver.surveyor import Surveyor
from hsfs.mdserver.tree import View, binding_of
from hsfs.mdserver.volume import DeviceFacts, Volume

Submit = Callable[[Callable[[Snapshot], Changes]], Awaitable[object]]
_DIRECTORY = int(FileType.DIRECTORY)


class Renewal:
    """Asks the sources about what a Judge found due, and merges what they say."""

    def __init__(
        self,
        store: MetadataStore,
        submit: Submit,
        volume: Volume,
        judge: Judge,
        clock: Clock,
        surveyor: Surveyor,
        tasks: asyncio.TaskGroup,
        apply: Callable[[DirectoryPage], Awaitable[int]],
    ) -> None:
        self._store = store
        self._submit = submit
        self._volume = volume
        self._judge = judge
        self._clock = clock
        self.sources = Revalidation(surveyor, tasks, clock, apply, self._gone, self._heard)

    async def renew(self, answer: Answer, asked_ns: int) -> bool:
        """Ask about all that is due; whether some of the answer has to stand although its source
        can't be asked (`stale_ok`). Raises what keeps a source from answering."""
        outcomes = await asyncio.gather(
            *(self._tolerant(due, answer.known, asked_ns) for due in answer.due)
        )
        return any(outcomes)

    async def _tolerant(self, due: Due, known: bool, asked_ns: int) -> bool:
        try:
            await self._renew_one(due, asked_ns)
        except (Unavailable, Unauthorised):
            if due.facts.stale_ok and known:
                return True
            raise
        return False

    async def _renew_one(self, due: Due, asked_ns: int) -> None:
        if not due.places or self._judge.relist(due, asked_ns):
            need_ns = due.need_ns
            listing = self.sources.listing(due.facts, due.directory, due.place, need_ns)

            def enough() -> bool:
                with self._store.snapshot() as snapshot:
                    coverage = View(snapshot, self._volume).coverage(due.directory, due.facts.id)
                if not due.keys:
                    return coverage is not None and coverage.as_of_ns >= need_ns
                return all(known_since(coverage, key) >= need_ns for key in due.keys)

            if not due.places:
                await listing.until(enough)
                return
            # A large directory: one page shows that it is; do not wait for the others.
            await listing.until(lambda: listing.pages > 0 or enough())
            if listing.done or enough():
                return
        await self.ask(due)

    async def ask(self, due: Due, force: bool = False) -> None:
        """Ask by itself about a name or an inode (by handle, where it has one)."""
        as_of_ns = self._clock.time_ns()
        facts = due.facts
        if not due.places:
            listing = self.sources.listing(facts, due.directory, due.place, as_of_ns, force)
            await listing.until(lambda: False)
            return
        try:
            answers = await self.sources.stat(facts, due.places, force)
        except StaleHandle:
            places = [Place(place.key) for place in due.places]
            answers = await self.sources.stat(facts, places, force)
        seen: list[ObjectStat] = []
        absent: list[bytes] = []
        for key, answer in zip(due.keys, answers, strict=True):
            prefix = facts.flat and key.endswith(b"/")
            if isinstance(answer, NotFound) or (
                facts.flat and prefix != (answer.type is FileType.DIRECTORY)
            ):
                absent.append(key)
            else:
                seen.append(_renamed(answer, key[:-1] if prefix else key))
        await self._learn(facts, due.directory, seen, absent, as_of_ns)
        self._judge.confirm(due, as_of_ns)

    async def ask_root(self, facts: DeviceFacts) -> None:
        """Ask for the attributes of a backend's root. What keeps it from answering is no error:
        the directory that shows it is there in any case."""
        as_of_ns = self._clock.time_ns()
        self._judge.confirm_root(facts, as_of_ns)  # others do not ask meanwhile
        try:
            (answer,) = await self.sources.stat(facts, (Place(b""),))
        except HsfsError:
            return
        if isinstance(answer, ObjectStat):
            volume, device, stat = self._volume, int(facts.id), answer
            await self._submit(lambda view: assimilate_root(view, volume, device, stat, as_of_ns))

    async def progress(self, due: Due) -> bool | None:
        """Wait until a directory's listing has come further: False = it goes on, True = it is
        whole, None = what is known has to stand. Raises what ended it."""
        facts = due.facts
        try:
            listing = self.sources.listing(facts, due.directory, due.place, due.need_ns)
            before = listing.pages
            await listing.until(lambda: listing.pages > before)
        except (Unavailable, Unauthorised):
            if not facts.stale_ok or due.entries is None:
                raise
            return None
        return listing.done

    async def relist(self, directory: int, need_ns: int) -> int:
        """List a directory at all its sources now; the number of entries. Raises NotFound,
        NotADirectory."""
        with self._store.snapshot() as snapshot:
            view = View(snapshot, self._volume)
            record = view.directory(directory)
            places = [
                (facts, place)
                for binding in record.bindings
                if (facts := self._volume.get(binding.device)) is not None
                and (place := view.directory_place(facts, directory, record)) is not None
            ]
        count = 0
        for facts, place in places:
            listing = self.sources.listing(facts, directory, place, need_ns, force=True)
            await listing.until(lambda: False)
            count += listing.entries
        return count

    async def _learn(
        self,
        facts: DeviceFacts,
        directory: int,
        seen: Sequence[ObjectStat],
        absent: Sequence[bytes],
        as_of_ns: int,
    ) -> None:
        volume, device = self._volume, int(facts.id)
        await self._submit(
            lambda view: assimilate_names(view, volume, device, directory, seen, absent, as_of_ns)
        )

    async def _gone(self, facts: DeviceFacts, directory: int, as_of_ns: int) -> None:
        """A directory is not where it was: ask what is there now."""
        with self._store.snapshot() as snapshot:
            view = View(snapshot, self._volume)
            record = view.inode(directory)
            binding = None if record is None else binding_of(record, facts.id)
            if binding is None or not binding.directory:
                return
            key = view.directory_key(facts, directory)
        if key is None:
            return
        answer = (await self.sources.stat(facts, (Place(key),)))[0]
        seen: list[ObjectStat] = []
        if isinstance(answer, ObjectStat):
            seen.append(_renamed(answer, binding.segment))
        absent = () if seen else (sort_key(binding.segment, _DIRECTORY, facts.flat),)
        await self._learn(facts, binding.directory, seen, absent, as_of_ns)

    def _heard(self, device: int, state: str, why: str) -> None:
        self._volume.set_state(device, state, why, self._clock.time_ns())


def _renamed(stat: ObjectStat, segment: bytes) -> ObjectStat:
    """The stat under the segment that was asked for, whatever its backend calls it."""
    return stat if stat.name == segment else msgspec.structs.replace(stat, name=segment)
