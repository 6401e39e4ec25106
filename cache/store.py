"""Tier 0 on disk: the ChunkStore of the mount.

Room is reserved before anything is written: a new file takes what it needs up to one chunk, a fill
of a larger file takes its blocks; what does not fit evicts (SIEVE, down to a low watermark), else
NoSpace. Bytes of a file count until its last descriptor is closed, so that `size` bounds what lies
on the disk.

Small files are the critical path: one open, one pwrite, one fstat and one close each; no rename, no
fsync and no index write. A block is believed because of its state in memory; a background thread
records changed files in the index every half second, and what it had not recorded at a crash is
removed at the next start (`hsfs.cache.index`).

Start: the log is read by the background thread, after an unclean stop followed by a sweep that
removes unrecorded files. Until then `find` knows nothing and `create` waits: the mount does not.

Trouble (read-only, removed, failing directory): `create` and `fill` raise CacheUnavailable at
once, what is open stays readable, `usage().trouble` says why; every two seconds a probe writes a
file and, if that works, the store is in use again (empty, where its directory had been replaced).

Lock order: `_evicting`, `_flushing`, a file's `lock`, `_lock`, the descriptor table's. No I/O under
`_lock` but a pread of the index, whose pages are warm.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hsfs.cache.adoption import adopt
from hsfs.cache.buffers import Buffers
from hsfs.cache.descriptors import Descriptors
from hsfs.cache.directory import Slot, key_of
from hsfs.cache.eviction import Sieve
from hsfs.cache.file import MISSING, Handle, OpenFile
from hsfs.cache.index import (
    CLEAN_FRAME,
    UNIT,
    Frame,
    Index,
    Kind,
    Record,
    Start,
    charge_of,
    encode_record,
)
from hsfs.core.blocks import block_count
from hsfs.core.errors import CacheUnavailable, Corrupt, HsfsError, NoSpace, Unsupported
from hsfs.core.ports import CachedFile, CacheUsage, ChunkStore
from hsfs.core.types import BLOCK_SIZE, CHUNK_SIZE, FileVersion, Ino

FILES_MAX = 1_000_000  # bounds the memory of the index: about 250 bytes a file
FLUSH_S = 0.5
FLUSH_FILES = 256
PROBE_S = 2.0
LOAD_WAIT_S = 60.0
LOW_WATERMARK = 1 / 32  # share of the bound that an eviction leaves free
EVICT_STEP = 256
CLOSE_WAIT_S = 1.0
FULL_SHOWN_S = 10.0
DISK_ROOM = 16 << 20  # evicted at least when the disk itself is full


def open_store(
    directory: Path,
    size: int,
    *,
    fd_limit: int,
    files_max: int = FILES_MAX,
    flush_s: float = FLUSH_S,
    probe_s: float = PROBE_S,
    buffers: int = 64,
) -> ChunkStore:
    """The store in `directory`, bounded to `size` bytes. Blocking, but not for the adoption of what
    is cached. Never fails for the directory's sake: see `usage().trouble`.

    fd_limit: cache files open at a time. files_max: bounds the index's memory. flush_s: how often
    changed files are recorded. probe_s: how often a troubled directory is tried again. buffers:
    1 MiB fill buffers, the number of fills at a time.
    """
    return DiskStore(directory, size, fd_limit, files_max, flush_s, probe_s, buffers)


class _Victim(NamedTuple):
    key: bytes
    charge: int
    state: OpenFile | None


class DiskStore:
    """See the module. Methods are those of ChunkStore and of `file.Keeper`."""

    def __init__(
        self,
        directory: Path,
        size: int,
        fd_limit: int,
        files_max: int,
        flush_s: float,
        probe_s: float,
        buffers: int,
    ) -> None:
        self.descriptors = Descriptors(fd_limit)
        self.buffers = Buffers(buffers)
        self._directory = directory
        self._size = size
        self._files_max = files_max
        self._flush_s = flush_s
        self._probe_s = probe_s
        self._lock = threading.Lock()
        self._evicting = threading.Lock()
        self._gone = threading.Condition(self._lock)  # a name in `_unlinking` is free again
        self._flushing = threading.Lock()
        self._wake = threading.Event()
        self._loaded = threading.Event()
        self._stop = False
        self._closed = False
        # Guarded by _lock
        self._slot: Slot | None = None
        self._index: Index | None = None
        self._files: dict[bytes, OpenFile] = {}
        self._doomed: set[OpenFile] = set()
        self._dirty: dict[bytes, OpenFile] = {}
        self._drops: dict[bytes, None] = {}
        self._unlinking: set[bytes] = set()
        self._sieve = Sieve()
        self._used = 0
        self._pinned = 0
        self._evicted = 0
        # Written by one thread at a time, read by all
        self._trouble = ""
        self._disk_full_until = 0.0
        self._start = Start(0, 0, b"")
        self._retired: list[Slot] = []
        self._below: int | None = None  # see Slot.acquire
        self._take_slot()
        self._thread = threading.Thread(target=self._background, name="hsfs-tier0", daemon=True)
        self._thread.start()

    # -- ChunkStore

    def find(self, file: FileVersion) -> CachedFile | None:
        """See ChunkStore.find."""
        return self._find(file, wait=False)

    def create(self, file: FileVersion) -> CachedFile:
        """See ChunkStore.create."""
        while True:
            found = self._find(file, wait=True)
            if found is not None:
                return found
            self._check_usable()
            made = self._make(file)
            if made is not None:
                return made

    def cached_bytes(self, file: FileVersion) -> int:
        """See ChunkStore.cached_bytes."""
        key = key_of(file)
        with self._lock:
            state = self._files.get(key)
            record = None if state or self._index is None else self._read_record(key)
        if state is not None:
            return _bytes_of(state.states, file.size) if state.file == file else 0
        if record is None or record.version != file.version:
            return 0
        if not record.states:
            return file.size
        with contextlib.suppress(zlib.error):
            return _bytes_of(zlib.decompress(record.states), file.size)
        return 0

    def evict(self, inos: Sequence[Ino]) -> int:
        """See ChunkStore.evict."""
        self._wait_loaded()
        wanted = {ino.to_bytes(8, "big") for ino in inos}
        with self._lock:
            keys = list(self._index.entries) if self._index is not None else []
        if wanted:
            keys = [key for key in keys if key[:8] in wanted]
        freed = 0
        for at in range(0, len(keys), EVICT_STEP):
            with self._evicting:
                with self._lock:
                    victims = [
                        self._take(key, queued=True)
                        for key in keys[at : at + EVICT_STEP]
                        if self._known(key) and self._evictable(key)
                    ]
                freed += self._remove(victims)
        return freed

    def usage(self) -> CacheUsage:
        """See ChunkStore.usage."""
        with self._lock:
            files = len(self._index.entries) if self._index is not None else 0
            trouble = self._trouble
            if not trouble and time.monotonic() < self._disk_full_until:
                trouble = "the disk is full, and nothing of the cache can be evicted"
            return CacheUsage(self._used, files, self._size, self._pinned, self._evicted, trouble)

    def flush(self) -> None:
        """See ChunkStore.flush. Raises CacheUnavailable."""
        self._wait_loaded()
        self._record_changes()

    def close(self) -> None:
        """See ChunkStore.close. Idempotent; handles still held can't be used afterwards."""
        if self._closed:
            return
        self._closed = True
        self._stop = True
        self._wake.set()
        self._thread.join()
        with self._lock:
            held = [*self._files.values(), *self._doomed]
        index, slot = self._index, self._slot
        if index is not None and not self._trouble and self._loaded.is_set():
            for state in held:
                if not index.recorded(state.key):
                    self.changed(state)
            with contextlib.suppress(HsfsError, OSError):
                self._record_changes()
                index.append([CLEAN_FRAME])
                index.sync()
        for state in held:
            self.descriptors.drop(state, CLOSE_WAIT_S)
        self.buffers.clear()
        if index is not None:
            index.close()
        for old in [*self._retired, slot]:
            if old is not None:
                old.close()

    # -- find and create

    def _find(self, file: FileVersion, *, wait: bool) -> Handle | None:
        key = key_of(file)
        if wait:
            self._wait_loaded()
        with self._lock:
            state = self._files.get(key)
            if state is not None:
                return self._use(state) if state.file == file else None
            index, slot = self._index, self._slot
            if index is None or slot is None or key not in index.entries:
                return None
            if not self._loaded.is_set():
                return None
            record = self._read_record(key)
            charge = charge_of(index.entries[key])
        if record is not None and (record.version, record.size) != (file.version, file.size):
            record = None  # another version with the same hash
        return self._restore(key, file, record, charge, index, slot, wait)

    def _restore(
        self,
        key: bytes,
        file: FileVersion,
        record: Record | None,
        charge: int,
        index: Index,
        slot: Slot,
        wait: bool,
    ) -> Handle | None:
        state = OpenFile(self, slot, key, file)
        state.fresh = False
        try:
            if record is None:
                raise Corrupt(state.what, "its record can't be read")
            fd = self.descriptors.acquire(state, wait=wait)
            if fd < 0:
                return None
            try:
                state.restore(record, charge, fd, self._start.floor)
            finally:
                self.descriptors.release(state)
        except (Corrupt, zlib.error):
            self.descriptors.drop(state)
            if wait:  # else left to the `create` that follows
                self._lose(key, index)
            return None
        except CacheUnavailable:
            self.descriptors.drop(state)
            if wait:
                raise
            return None
        except OSError as error:
            self.descriptors.drop(state)
            if wait:
                raise self.failed(error) from error
            return None
        with self._lock:
            other = self._files.get(key)
            packed = index.entries.get(key)
            unchanged = packed is not None and charge_of(packed) == charge
            if other is None and unchanged and index is self._index:
                self._files[key] = state
                return self._use(state)
            handle = self._use(other) if other is not None and other.file == file else None
        self.descriptors.drop(state)
        return handle

    def _make(self, file: FileVersion) -> Handle | None:
        """A new cache file, pinned; None when another thread was quicker."""
        key = key_of(file)
        slot, index = self._slot, self._index
        if slot is None or index is None:
            raise self._unusable()
        state = OpenFile(self, slot, key, file)
        charge = min(state.full_charge, CHUNK_SIZE)
        self._reserve(charge, files=1)
        with self._lock:
            while key in self._unlinking:
                self._gone.wait()
            if key in index.entries or index is not self._index:
                self._used -= charge
                taken = self._files.get(key)
                if taken is not None and taken.file != file:
                    raise NoSpace(state.what, "another version holds its place in the cache")
                return None
            state.reserved = charge
            index.entries[key] = charge // UNIT
            self._sieve.add(key)
            self._files[key] = state
            handle = self._pin(state)
        try:
            self._create_on_disk(state)
        except BaseException:
            with self._lock:
                state.doomed = True
                self._doomed.add(state)
                if self._files.get(key) is state:
                    del self._files[key]
                    index.forget(key)
                    self._sieve.discard(key)
                self._dirty.pop(key, None)
            handle.release()
            raise
        return handle

    def _create_on_disk(self, state: OpenFile) -> None:
        while True:
            try:
                self.descriptors.acquire(state)
            except NoSpace:
                if not self.make_disk_room(UNIT):
                    raise
            else:
                self.descriptors.release(state)
                return

    def _use(self, state: OpenFile) -> Handle:
        """Pin a file that was there already: a hit. Under the lock."""
        if not state.pins:
            self._sieve.touch(state.key)
        return self._pin(state)

    def _pin(self, state: OpenFile) -> Handle:
        """Under the lock."""
        if not state.pins:
            self._pinned += 1
            self.descriptors.pin(state)
        state.pins += 1
        return Handle(state)

    def unpin(self, file: OpenFile) -> None:
        """See Keeper.unpin."""
        trimmed = False
        with self._lock:
            file.pins -= 1
            if file.pins:
                return
            self._pinned -= 1
            if not file.doomed:
                charge = file.charge
                if charge < file.reserved:
                    self._used -= file.reserved - charge
                    file.reserved = charge
                    trimmed = True
        if file.doomed:
            self.descriptors.drop(file)
            with self._lock:
                if file in self._doomed:
                    self._doomed.discard(file)
                    self._used -= file.reserved
            return
        if trimmed:
            self.changed(file)
        closed = self.descriptors.idle(file)
        if closed:
            with self._lock:
                for holder in closed:
                    if isinstance(holder, OpenFile):
                        self._leave(holder)

    def _leave(self, state: OpenFile) -> None:
        """Forget the memory of a file that is not in use and recorded. Under the lock."""
        key = state.key
        if state.pins or state.dirty or state.fd >= 0 or self._files.get(key) is not state:
            return
        if self._index is not None:
            if not self._index.recorded(key):  # made, and never filled
                state.dirty = True
                self._dirty[key] = state
                return
            self._index.set_charge(key, state.reserved // UNIT)
        del self._files[key]

    # -- Keeper: what open files ask for

    def admit(self, file: OpenFile, count: int) -> None:
        """See Keeper.admit."""
        if self._trouble and not file.doomed:
            raise self._unusable()
        if file.reserved >= file.full_charge:
            return
        with self._lock:
            file.inflight += count
            wanted = self._wanted(file)
        if wanted > 0:
            try:
                self._reserve(wanted, owner=file)
            except BaseException:
                self.settle(file, count)
                raise

    def settle(self, file: OpenFile, count: int) -> None:
        """See Keeper.settle."""
        if file.inflight:
            with self._lock:
                file.inflight = max(0, file.inflight - count)
        self.changed(file)

    def changed(self, file: OpenFile) -> None:
        """See Keeper.changed."""
        with self._lock:
            if file.dirty or file.doomed or self._files.get(file.key) is not file:
                return
            file.dirty = True
            self._dirty[file.key] = file
            if len(self._dirty) == FLUSH_FILES:
                self._wake.set()

    def failed(self, error: OSError) -> HsfsError:
        """See Keeper.failed."""
        why = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoSpace(str(self._directory), why)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return CacheUnavailable(str(self._directory), why)
        self._set_trouble(_explain(error))
        return self._unusable()

    def make_disk_room(self, size: int) -> bool:
        """See Keeper.make_disk_room."""
        with self._evicting:
            freed = self._remove(self._victims(max(size, DISK_ROOM, self._size // 64)))
        if not freed:
            self._disk_full_until = time.monotonic() + FULL_SHOWN_S
        return freed > 0

    def segment(self, key: bytes, number: int) -> bytes | None:
        """See Keeper.segment."""
        index = self._index
        if index is None:
            return None
        with self._lock, contextlib.suppress(OSError):
            return index.segment(key, number)
        return None

    # -- room

    def _wanted(self, file: OpenFile) -> int:
        """Bytes that the file's present and admitted blocks need beyond what it has. Locked."""
        held = (file.held + file.inflight) * BLOCK_SIZE
        return min(held, file.full_charge) - file.reserved

    def _fits(self, size: int, files: int) -> bool:
        index = self._index
        count = len(index.entries) if index is not None else 0
        return self._used + size <= self._size and count + files <= self._files_max

    def _reserve(self, size: int, *, files: int = 0, owner: OpenFile | None = None) -> None:
        """Count `size` bytes as used (by `owner`, if given), evicting for it. Raises NoSpace."""
        with self._lock:
            if self._take_room(size, files, owner):
                return
        with self._evicting:
            while True:
                with self._lock:
                    if self._take_room(size, files, owner):
                        return
                    over = self._used + size - self._size
                victims = self._victims(max(1, over + int(self._size * LOW_WATERMARK)))
                if not victims:
                    with self._lock:
                        if self._take_room(size, files, owner):
                            return
                    raise NoSpace(
                        str(self._directory),
                        f"no room for {size} bytes within the cache's {self._size}",
                        "raise cache.size, or close files",
                    )
                self._remove(victims)

    def _take_room(self, size: int, files: int, owner: OpenFile | None) -> bool:
        if owner is not None:
            # Another fill of the file may have reserved, or finished, meanwhile.
            size = max(0, self._wanted(owner))
        if not self._fits(size, files):
            return False
        self._used += size
        if owner is not None:
            owner.reserved += size
        return True

    def _known(self, key: bytes) -> bool:
        return self._index is not None and key in self._index.entries

    def _evictable(self, key: bytes) -> bool:
        state = self._files.get(key)
        return state is None or not state.pins

    def _victims(self, size: int) -> list[_Victim]:
        """Take files of `size` bytes in all out of the store; the caller removes them."""
        victims: list[_Victim] = []
        freed = 0
        with self._lock:
            while freed < size:
                key = self._sieve.evict(self._evictable)
                if key is None:
                    break
                victim = self._take(key)
                freed += victim.charge
                victims.append(victim)
        return victims

    def _take(self, key: bytes, *, queued: bool = False) -> _Victim:
        """Forget an unpinned file; its bytes count until `_remove`. Under the lock."""
        index = self._index
        packed = index.entries.get(key, 0) if index is not None else 0
        state = self._files.pop(key, None)
        if state is not None:
            state.doomed = True
        self._dirty.pop(key, None)
        if index is not None:
            index.forget(key)
        self._drops[key] = None
        self._unlinking.add(key)
        if queued:
            self._sieve.discard(key)
        return _Victim(key, state.reserved if state is not None else charge_of(packed), state)

    def _remove(self, victims: list[_Victim]) -> int:
        """Unlink taken files, then free their bytes. Blocking, under `_evicting`."""
        slot = self._slot
        freed = 0
        for key, charge, state in victims:
            if state is not None:
                self.descriptors.drop(state)
            try:
                if slot is not None:
                    slot.remove(key)
            except OSError as error:
                self._set_trouble(_explain(error))
            freed += charge
        with self._lock:
            self._unlinking.difference_update(victim.key for victim in victims)
            self._used -= freed
            self._evicted += freed
            self._gone.notify_all()
        return freed

    def _lose(self, key: bytes, index: Index) -> None:
        """A recorded file is not what its record says, or is gone: forget and remove it."""
        with self._evicting:
            with self._lock:
                known = index is self._index and key in index.entries and key not in self._files
                victims = [self._take(key, queued=True)] if known else []
            if victims:
                self._remove(victims)

    # -- trouble

    def _check_usable(self) -> None:
        if self._closed:
            raise CacheUnavailable(str(self._directory), "the cache is closed")
        if self._trouble:
            raise self._unusable()

    def _unusable(self) -> CacheUnavailable:
        return CacheUnavailable(str(self._directory), self._trouble or "not in use")

    def _set_trouble(self, why: str) -> None:
        if not self._trouble:
            self._trouble = why
            self._wake.set()

    def _wait_loaded(self) -> None:
        if self._loaded.is_set():
            return
        deadline = time.monotonic() + LOAD_WAIT_S
        while not self._trouble and not self._stop and time.monotonic() < deadline:
            if self._loaded.wait(0.2):
                return
        raise CacheUnavailable(str(self._directory), self._trouble or "still reading its index")

    def _read_record(self, key: bytes) -> Record | None:
        """Under the lock."""
        if self._index is None:
            return None
        with contextlib.suppress(OSError):
            return self._index.read(key)
        return None

    # -- the background thread

    def _background(self) -> None:
        next_probe = 0.0
        while not self._stop:
            self.buffers.tidy()
            try:
                if self._index is not None and not self._loaded.is_set() and not self._trouble:
                    self._adopt()
                if self._loaded.is_set() and not self._trouble:
                    self._record_changes()
                if time.monotonic() >= next_probe and not self._stop:
                    self._probe()
                    next_probe = time.monotonic() + self._probe_s
            except OSError as error:
                self._set_trouble(_explain(error))
            except NoSpace:
                self.make_disk_room(UNIT)
            except HsfsError:
                pass  # noted by whoever raised it; the next round tries again
            except Exception as error:  # the mount goes on without its cache, and says why
                self._set_trouble(f"internal error: {error!r}")
            if not self._stop:
                self._wake.wait(min(self._flush_s, self._probe_s))
                self._wake.clear()

    def _take_slot(self) -> None:
        """Lock a slot and open its index; trouble if that can't be."""
        try:
            slot = Slot.acquire(self._directory, self._below)
        except OSError as error:
            self._trouble = _explain(error)
            return
        try:
            index = Index(slot.fd, self._lock)
        except (OSError, Unsupported) as error:
            slot.close()
            self._trouble = error.why if isinstance(error, Unsupported) else _explain(error)
            return
        self._below = slot.below
        with self._lock:
            self._slot, self._index = slot, index
            self._trouble = ""

    def _probe(self) -> None:
        """Notice a directory that was removed or replaced, and the end of trouble."""
        slot = self._slot
        if slot is not None and not slot.in_place():
            self._set_trouble("the directory was removed or replaced")
            self._abandon(slot)
            slot = None
        if slot is None:
            self._take_slot()
        elif self._trouble:
            try:
                slot.probe()
            except OSError as error:
                self._trouble = _explain(error)
                return
            self._trouble = ""

    def _abandon(self, slot: Slot) -> None:
        """Forget a slot whose directory is gone; pinned files live on by their descriptors."""
        with self._evicting, self._flushing:
            with self._lock:
                states = list(self._files.values())
                index, self._index, self._slot = self._index, None, None
                if index is not None and self._loaded.is_set():
                    self._used -= sum(
                        charge_of(packed)
                        for key, packed in index.entries.items()
                        if key not in self._files
                    )
                    self._used -= sum(s.reserved for s in states if not s.pins)
                self._loaded.clear()
                self._retired.append(slot)
                self._files.clear()
                self._dirty.clear()
                self._drops.clear()
                self._sieve = Sieve()
                for state in states:
                    state.doomed = True
                self._doomed.update(s for s in states if s.pins)
            for state in states:
                if not state.pins:
                    self.descriptors.drop(state)
            if index is not None:
                index.close()

    def _adopt(self) -> None:
        """Read the log, take the slot over, remove what is not recorded. Raises OSError."""
        index, slot = self._index, self._slot
        if index is None or slot is None:
            return
        start = adopt(index, slot, lambda: self._stop)
        if start is None:
            return
        self._start = start
        used = 0
        for key, packed in index.entries.items():
            self._sieve.add(key)
            used += charge_of(packed)
        with self._lock:
            self._used += used
        self._loaded.set()
        with self._evicting:
            self._remove(self._victims(self._used - self._size))
        slot.remove_idle()

    def _record_changes(self) -> None:
        """Append what changed to the log. Raises CacheUnavailable; what failed stays to do."""
        with self._flushing:
            with self._lock:
                index = self._index
                if index is None:
                    raise self._unusable()
                dirty, self._dirty = self._dirty, {}
                drops, self._drops = self._drops, {}
                for state in dirty.values():
                    state.dirty = False
            if not dirty and not drops:
                return
            frames = [Frame(Kind.DROP, key, 0, b"") for key in drops]
            taken: list[tuple[OpenFile, list[tuple[int, bytes]]]] = []
            for key, state in dirty.items():
                record, segments = state.record(self._start.run)
                taken.append((state, segments))
                frames += [Frame(Kind.SEGMENT, key, n, data) for n, data in segments]
                frames.append(Frame(Kind.FILE, key, state.charge // UNIT, encode_record(record)))
            try:
                index.append(frames)
                index.compact(self._start)
            except OSError as error:
                self._not_recorded(taken, drops)
                raise self.failed(error) from error
            self._recorded(taken)

    def _recorded(self, taken: list[tuple[OpenFile, list[tuple[int, bytes]]]]) -> None:
        for state, segments in taken:
            if segments:
                with state.lock:
                    state.hashes.settle()
        with self._lock:
            for state, _ in taken:
                self._leave(state)

    def _not_recorded(
        self, taken: list[tuple[OpenFile, list[tuple[int, bytes]]]], drops: dict[bytes, None]
    ) -> None:
        for state, segments in taken:
            with state.lock:
                state.hashes.redo(segments)
            self.changed(state)
        with self._lock:
            self._drops = drops | self._drops


def _bytes_of(states: bytes | bytearray, size: int) -> int:
    """Bytes of the present blocks: unproven ones count, they are checked when they are read."""
    if not states:
        return 0
    blocks = block_count(size)
    present = blocks - states.count(MISSING)
    last = size - (blocks - 1) * BLOCK_SIZE
    return present * BLOCK_SIZE - (BLOCK_SIZE - last if states[-1] != MISSING else 0)


def _explain(error: OSError) -> str:
    """In words, for `status`."""
    words = {
        errno.EROFS: "the cache's file system is read-only",
        errno.ENOENT: "the directory was removed",
        errno.EIO: "the cache disk fails (input/output error)",
        errno.EACCES: "no permission to write there",
        errno.EPERM: "no permission to write there",
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
    }
    return words.get(error.errno or 0, error.strerror or str(error))
