"""One cache file in use: which blocks it has, filling them, reading them.

State map, one byte per block: 0 missing, 1 present and right, 2 present but to be proven by its
hash before the first use (the file was not closed cleanly in this boot, or has changed on disk).
`OpenFile` is shared by all holders of a FileVersion; `Handle` is one holder's pin.

Threads: `lock` guards states, counters and hashes; it is held for memory operations only. A reader
may look at the state map without it: a byte is set after the block's bytes have been written and
hashed, and cleared before anything else can be written there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import zlib
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

from hsfs.cache.buffers import BUFFER_SIZE, Buffers
from hsfs.cache.descriptors import Descriptors
from hsfs.cache.directory import Slot
from hsfs.cache.index import UNIT, Record
from hsfs.cache.integrity import HASH_SIZE, BlockHashes, hash_blocks, matches
from hsfs.core import blocks
from hsfs.core.errors import CacheUnavailable, Corrupt, HsfsError
from hsfs.core.types import BLOCK_SIZE, Extent, FileVersion

MISSING, RIGHT, UNPROVEN = 0, 1, 2

_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_SMALL = 4096

# A bytes object made without a copy: allocated uninitialised and filled by the kernel before
# anybody else can see it, as C code does. preadv into a bytearray and bytes() of it costs twice
# as much CPU at 128 KiB, and os.pread has no RWF_NOWAIT.
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype = ctypes.py_object
_view_of.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_WRITABLE = 0x200  # PyBUF_WRITE
_PAYLOAD = bytes.__basicsize__ - 1


class Keeper(Protocol):
    """What a file needs of the store that keeps it."""

    descriptors: Descriptors
    buffers: Buffers

    def admit(self, file: OpenFile, count: int) -> None:
        """Reserve room for `count` more blocks. Raises NoSpace, CacheUnavailable."""

    def settle(self, file: OpenFile, count: int) -> None:
        """`count` admitted blocks are written or given up."""

    def changed(self, file: OpenFile) -> None:
        """The file's record is out of date."""

    def failed(self, error: OSError) -> HsfsError:
        """What a failed write or open of a cache file means; the store takes note."""

    def make_disk_room(self, size: int) -> bool:
        """The disk is full though the bound is not reached: evict; whether anything went."""

    def unpin(self, file: OpenFile) -> None:
        """A holder has gone."""

    def segment(self, key: bytes, number: int) -> bytes | None:
        """Recorded hashes."""


class OpenFile:
    """Shared state of a cache file. Made and forgotten by the store, under its lock."""

    __slots__ = (
        "blocks",
        "dirty",
        "doomed",
        "extra",
        "fd",
        "file",
        "filling",
        "fresh",
        "full_charge",
        "hashes",
        "inflight",
        "inode",
        "keeper",
        "key",
        "lock",
        "opening",
        "pins",
        "present",
        "reserved",
        "right",
        "size",
        "slot",
        "spoiled",
        "stat",
        "states",
        "users",
        "writable",
    )

    def __init__(self, keeper: Keeper, slot: Slot, key: bytes, file: FileVersion) -> None:
        self.keeper = keeper
        self.slot = slot
        self.key = key
        self.file = file
        self.size = file.size
        self.blocks = blocks.block_count(file.size)
        self.full_charge = charge_for(file.size)
        self.lock = Lock()
        self.states = bytearray(self.blocks)
        self.right = 0  # blocks in state RIGHT
        self.present = 0  # blocks in state RIGHT or UNPROVEN
        self.spoiled: set[int] = set()  # missing blocks whose bytes are on disk all the same
        self.extra = 0  # the same of an earlier use: how many, not which
        self.hashes = BlockHashes(self.blocks, self._segment)
        self.filling = 0  # fills that write
        # Descriptor (guarded by the table's lock)
        self.fd = -1
        self.users = 0
        self.opening = Lock()
        # Guarded by the store's lock
        self.pins = 0
        self.inflight = 0  # admitted blocks
        self.reserved = 0  # bytes of the bound
        self.dirty = False  # waits to be recorded
        self.doomed = False  # its directory entry is gone; lives until unpinned
        # The cache file
        self.fresh = True  # to be created
        self.writable = True
        self.inode: tuple[int, int] | None = None
        # Size, mtime and ctime after our last write; None: not known, so not to be trusted.
        self.stat: tuple[int, int, int] | None = None

    # -- the file on disk

    def open_fd(self) -> int:
        """A descriptor of the cache file. Raises Corrupt (not the file it was), CacheUnavailable.

        For the descriptor table; one call at a time.
        """
        try:
            if self.fresh:
                fd = self.slot.make(self.key)
                self.fresh = False
                return fd
            fd = self._reopen()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR) and not self.doomed:
                self.drop(0, self.blocks)
                self.fresh = True
                raise Corrupt(self.what, "the cache file is gone") from error
            raise self._failed(error) from error
        found = os.fstat(fd)
        if self.inode is None:
            self.inode = (found.st_dev, found.st_ino)
        elif self.inode != (found.st_dev, found.st_ino):
            os.close(fd)
            self.drop(0, self.blocks)
            self.inode = None
            raise Corrupt(self.what, "the cache file was replaced")
        else:
            self._notice_change(found)
        return fd

    def _reopen(self) -> int:
        try:
            fd = self.slot.open(self.key, os.O_RDWR)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            self.writable = False
            return self.slot.open(self.key, os.O_RDONLY)
        self.writable = True
        return fd

    def _failed(self, error: OSError) -> HsfsError:
        if self.doomed:  # says nothing about the directory that is in use now
            return CacheUnavailable(self.what, error.strerror or str(error))
        return self.keeper.failed(error)

    def take_stat(self, fd: int) -> os.stat_result:
        """Note the cache file's own attributes, after a write and before its record."""
        found = os.fstat(fd)
        self.inode = (found.st_dev, found.st_ino)
        self.stat = _stat_of(found)
        return found

    @property
    def what(self) -> str:
        """For messages."""
        return f"cached inode {self.file.ino}"

    def _segment(self, number: int) -> bytes | None:
        return self.keeper.segment(self.key, number)

    # -- the record in the index

    def restore(self, record: Record, charge: int, fd: int, floor: int) -> None:
        """Take up a recorded state, which stands for `charge` bytes; not shared yet. Unproven
        unless its run is trusted and the cache file is as it was left."""
        found = self.take_stat(fd)
        self.fresh = False
        states = zlib.decompress(record.states) if record.states else b"\1" * self.blocks
        trusted = record.run >= floor > 0 and (
            record.device,
            record.inode,
            record.stat_size,
            record.mtime_ns,
            record.ctime_ns,
        ) == (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        wanted = bytearray(states)
        if len(wanted) != self.blocks or (
            record.hashes and len(record.hashes) != self.blocks * HASH_SIZE
        ):
            wanted = bytearray(self.blocks)
        self.present = self.blocks - wanted.count(MISSING)
        self.reserved = charge
        self.extra = max(0, charge - self.charge + BLOCK_SIZE - 1) // BLOCK_SIZE
        if trusted:
            self.right = self.present
        else:
            wanted = bytearray(wanted.replace(b"\1", b"\2"))
        self.states = wanted
        self.hashes = BlockHashes(self.blocks, self._segment, record.hashes)

    def record(self, run: int) -> tuple[Record, list[tuple[int, bytes]]]:
        """What to write to the index now: the record and the segments that changed."""
        with self.lock:
            states = b""
            if self.present < self.blocks:
                states = zlib.compress(self.states.replace(b"\2", b"\1"), 1)
            if self.right < self.present:
                run = 0
            single = self.hashes.single
            hashes = self.hashes.whole() if single else b""
            segments = [] if single else self.hashes.take_dirty()
            device, inode = self.inode or (0, 0)
            stat = self.stat or (-1, 0, 0)
        return (
            Record(
                self.file.version,
                self.size,
                run,
                device,
                inode,
                *stat,
                states=states,
                hashes=hashes,
            ),
            segments,
        )

    # -- block states

    @property
    def charge(self) -> int:
        """Bytes of the bound for what is on the disk."""
        return max(UNIT, min(self.held * BLOCK_SIZE, self.full_charge))

    @property
    def held(self) -> int:
        """Blocks on the disk. Those that were dropped stay there, counted, until they are filled
        or the file goes: a hole punched instead could reach a reader that is past its check."""
        return self.present + len(self.spoiled) + self.extra

    def mark(self, first: int, last: int, digests: bytes) -> None:
        """Blocks [first, last) are written and right."""
        with self.lock:
            count = last - first
            old_right = self.states.count(RIGHT, first, last)
            old_missing = self.states.count(MISSING, first, last)
            self.hashes.put(first, digests)
            self.states[first:last] = b"\1" * count
            self.right += count - old_right
            self.present += old_missing
            if self.spoiled:
                self.spoiled.difference_update(range(first, last))

    def drop(self, first: int, last: int) -> None:
        """Blocks [first, last) are not what they should be: missing from now on, and all others
        are to be proven before they are used again."""
        with self.lock:
            self._distrust()
            for index in range(first, last):
                state = self.states[index]
                if state == MISSING:
                    continue
                self.states[index] = MISSING
                self.present -= 1
                self.spoiled.add(index)
        self.keeper.changed(self)

    def _distrust(self) -> None:
        """Somebody else changed the file: nothing of it is believed unproven. Locked."""
        self.states = bytearray(self.states.replace(b"\1", b"\2"))
        self.right = 0
        self.stat = None

    def _notice_change(self, found: os.stat_result) -> None:
        """Somebody else changed the file if it is not as our last write left it."""
        if self.stat not in (None, _stat_of(found)):
            with self.lock:
                self._distrust()
            self.keeper.changed(self)

    def _spoil(self, first: int, last: int) -> None:
        """A write of these missing blocks may have happened in part."""
        with self.lock:
            self.spoiled.update(i for i in range(first, last) if not self.states[i])

    def prove(self, index: int, fd: int) -> bool:
        """Check an unproven block against its hash; false, the block dropped, if it is wrong."""
        extent = blocks.block_extent(index, self.size)
        with self.lock:
            digest = self.hashes.get(index)
        data = b""
        with contextlib.suppress(OSError):  # an unreadable block is a wrong one: fetch it again
            data = pread_full(fd, extent.length, extent.offset)
        if len(data) != extent.length or not matches(data, digest):
            self.drop(index, index + 1)
            return False
        with self.lock:
            if self.states[index] != UNPROVEN:
                return self.states[index] == RIGHT
            self.states[index] = RIGHT
            self.right += 1
            proven = self.right == self.blocks
        if proven:
            self.keeper.changed(self)
        return True

    # -- filling

    def fill(self, extent: Extent, read: Callable[[int, memoryview], int]) -> None:
        """See CachedFile.fill."""
        if not blocks.is_aligned(extent, self.size):
            raise ValueError(f"{extent} is not made of blocks of a file of {self.size} bytes")
        first, last = blocks.block_span(extent.offset, extent.length)
        runs = blocks.zero_runs(self.states, first, last)
        if not runs:
            return
        count = sum(b - a for a, b in runs)
        keeper = self.keeper
        keeper.admit(self, count)
        try:
            fd = keeper.descriptors.acquire(self)
            try:
                if not self.writable:
                    raise CacheUnavailable(self.what, "the cache file can't be written")
                buffer = keeper.buffers.take()
                try:
                    with self.lock:
                        alone = not self.filling
                        self.filling += 1
                    if alone and self.present:
                        # A cut-off tail would turn into zeros with the write.
                        self._notice_change(os.fstat(fd))
                    for a, b in runs:
                        self._fill_run(fd, buffer, a, b, read)
                finally:
                    keeper.buffers.give(buffer)
                    self.take_stat(fd)
                    with self.lock:
                        self.filling -= 1
            finally:
                keeper.descriptors.release(self)
        finally:
            keeper.settle(self, count)

    def _fill_run(
        self,
        fd: int,
        buffer: memoryview,
        first: int,
        last: int,
        read: Callable[[int, memoryview], int],
    ) -> None:
        offset = first * BLOCK_SIZE
        end = min(last * BLOCK_SIZE, self.size)
        while offset < end:
            length = min(end - offset, BUFFER_SIZE)
            view = buffer[:length]
            got = read(offset, view)
            if got != length:
                raise Corrupt(self.what, f"the source gave {got} of {length} bytes at {offset}")
            digests = hash_blocks(view)
            a, b = offset // BLOCK_SIZE, -(-(offset + length) // BLOCK_SIZE)
            try:
                written = os.pwrite(fd, view, offset)
                if written != length:
                    self._write(fd, view, written, offset)
            except OSError as error:
                self._spoil(a, b)
                if error.errno not in _FULL:
                    raise self._failed(error) from error
                self._write_when_full(fd, view, offset)
            self.mark(a, b, digests)
            offset += length

    @staticmethod
    def _write(fd: int, view: memoryview, written: int, offset: int) -> None:
        while written < len(view):
            written += os.pwrite(fd, view[written:], offset + written)

    def _write_when_full(self, fd: int, view: memoryview, offset: int) -> None:
        while True:
            more = self.keeper.make_disk_room(len(view))
            try:
                self._write(fd, view, 0, offset)
            except OSError as error:
                if not more or error.errno not in _FULL:
                    raise self._failed(error) from error
            else:
                return

    # -- reading

    def read_now(self, offset: int, length: int) -> bytes | None:
        """See CachedFile.read_cached; the range lies within the file and is not empty."""
        if self.right != self.blocks:
            first = offset // BLOCK_SIZE
            last = -(-(offset + length) // BLOCK_SIZE)
            if self.states.count(RIGHT, first, last) != last - first:
                return None
        descriptors = self.keeper.descriptors
        try:
            fd = descriptors.acquire(self, wait=False)
        except HsfsError:
            return None  # the blocking read meets it again and says so
        if fd < 0:
            return None
        try:
            if length < _SMALL:
                small = bytearray(length)
                got = os.preadv(fd, (small,), offset, os.RWF_NOWAIT)
                return bytes(small) if got == length else None
            data: bytes = _new_bytes(None, length)
            view = _view_of(id(data) + _PAYLOAD, length, _WRITABLE)
            got = os.preadv(fd, (view,), offset, os.RWF_NOWAIT)
            return data if got == length else None
        except OSError:
            return None
        finally:
            descriptors.release(self)

    def read(self, offset: int, length: int) -> bytes:
        """See CachedFile.read; the range lies within the file and is not empty."""
        first = offset // BLOCK_SIZE
        last = -(-(offset + length) // BLOCK_SIZE)
        descriptors = self.keeper.descriptors
        fd = descriptors.acquire(self)
        try:
            if self.right != self.blocks:
                self._prove_all(first, last, fd)
            try:
                data = pread_full(fd, length, offset)
            except OSError as error:
                self.drop(first, last)
                raise Corrupt(self.what, error.strerror or str(error)) from error
        finally:
            descriptors.release(self)
        if len(data) != length:
            self.drop((offset + len(data)) // BLOCK_SIZE, self.blocks)
            raise Corrupt(self.what, "the cache file is shorter than it was")
        return data

    def _prove_all(self, first: int, last: int, fd: int) -> None:
        """All wrong blocks are found before the first is complained of: one refetch mends all."""
        wrong = [
            index
            for index in range(first, last)
            if self.states[index] == MISSING
            or (self.states[index] == UNPROVEN and not self.prove(index, fd))
        ]
        if wrong:
            raise Corrupt(self.what, f"block {wrong[0]} is missing or does not match its hash")


class Handle:
    """A holder's pin: the CachedFile of the disk store."""

    __slots__ = ("_open", "_released")

    def __init__(self, open_file: OpenFile) -> None:
        self._open = open_file
        self._released = False

    @property
    def file(self) -> FileVersion:
        return self._open.file

    @property
    def complete(self) -> bool:
        return self._open.right == self._open.blocks

    def missing(self, extent: Extent) -> Sequence[Extent]:
        state = self._open
        if state.present == state.blocks:
            return ()
        return blocks.missing(state.states, extent, state.size)

    def fill(self, extent: Extent, read: Callable[[int, memoryview], int]) -> None:
        self._open.fill(extent, read)

    def read_cached(self, offset: int, size: int) -> bytes | None:
        state = self._open
        length = min(size, state.size - offset)
        return state.read_now(offset, length) if length > 0 else b""

    def read(self, offset: int, size: int) -> bytes:
        state = self._open
        length = min(size, state.size - offset)
        return state.read(offset, length) if length > 0 else b""

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._open.keeper.unpin(self._open)


def _stat_of(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def charge_for(size: int) -> int:
    """Bytes of the bound that a whole file of `size` bytes needs: disk blocks, at least one."""
    return max(UNIT, -(-size // UNIT) * UNIT)


def pread_full(fd: int, length: int, offset: int) -> bytes:
    """`length` bytes, fewer only at the end of the file. Raises OSError."""
    data = os.pread(fd, length, offset)
    if len(data) == length or not data:
        return data
    parts = [data]
    have = len(data)
    while have < length and (data := os.pread(fd, length - have, offset + have)):
        parts.append(data)
        have += len(data)
    return b"".join(parts)
