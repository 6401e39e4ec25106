"""The index of a slot: an append-only log of checksummed frames.

Why not LMDB here, as in the metadata server: the index lives inside the mount process, and losing
the cache is allowed where crashing the mount or serving wrong bytes is not. A memory map of a
failing disk or of a truncated file is a SIGBUS, and damaged B-tree pages can take the process
down, again at every start. Here all I/O is pread and pwrite: damage is an exception or a checksum
that does not match. A batch is one pwrite; nothing is synced, because nothing depends on it: what
a crash took is not in the index and its file is removed at the next start, and whatever was not
closed cleanly in this boot is proven by its block hashes before its first use.

    header   magic, schema
    frame    check u32 (low half of xxh3-64 of the rest) | length u32 | kind u8, 3 pad |
             number u32 | key 16 | payload
      START    number 0       Start: a process took the slot over
      CLEAN    number 0       the process that wrote START closed everything; always the last frame
      FILE     4 KiB units    Record: the newest one of a key counts
      SEGMENT  segment        256 block hashes of a file of more than 256 blocks
      DROP     number 0       the key is gone, with its segments

In memory there is one dictionary entry per file (about 190 bytes): offset of its record and charge.
Reading stops at the first frame that does not check, and what follows is cut off: the run then
counts as not cleanly closed. When most frames are dead the log is rewritten.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from threading import Lock
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from hsfs.core.errors import Unsupported

SCHEMA = 1
UNIT = 4096
NO_OFFSET = 0  # known in memory only, not recorded yet

_HEADER = struct.Struct("<16sI12x")
_MAGIC = b"hsfs tier0 index"
_FRAME = struct.Struct("<IIB3xI16s")
_READ = 4 << 20
_FRAME_MAX = 64 << 20
_PEEK = 512
_NO_KEY = bytes(16)
_DEAD_MIN = 4096
_SWAP = 2048


class Kind(IntEnum):
    """Kinds of frames. Stored: never renumbered."""

    START = 1
    CLEAN = 2
    FILE = 3
    SEGMENT = 4
    DROP = 5


class Start(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run: its number, the first run since which everything is closed cleanly, the boot."""

    run: int
    floor: int
    boot: bytes


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One cache file. `run` is the run in which all its present blocks were known to be right (0:
    prove each before use); stat values are the cache file's own, taken after the last write.
    `states` is b"" for a complete file, else its zlib-compressed state map. `hashes` is b"" when
    they are in segments.
    """

    version: bytes
    size: int
    run: int
    device: int
    inode: int
    stat_size: int
    mtime_ns: int
    ctime_ns: int
    states: bytes
    hashes: bytes


class Frame(NamedTuple):
    """A frame to append."""

    kind: Kind
    key: bytes
    number: int
    payload: bytes


class Loaded(NamedTuple):
    """What the log says of its last run: `clean` if it ended with CLEAN and nothing was damaged."""

    start: Start | None
    clean: bool


class _Found(NamedTuple):
    kind: int
    number: int
    key: bytes
    offset: int
    whole: bytes


_encode_start = msgspec.msgpack.Encoder().encode
_decode_start = msgspec.msgpack.Decoder(Start).decode
encode_record = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(Record).decode


def start_frame(start: Start) -> Frame:
    return Frame(Kind.START, _NO_KEY, 0, _encode_start(start))


CLEAN_FRAME = Frame(Kind.CLEAN, _NO_KEY, 0, b"")


def _pack(frame: Frame) -> bytes:
    raw = _FRAME.pack(0, len(frame.payload), frame.kind, frame.number, frame.key) + frame.payload
    check = xxh3_64_intdigest(memoryview(raw)[4:]) & 0xFFFFFFFF
    return check.to_bytes(4, "little") + raw[4:]


def charge_of(packed: int) -> int:
    """Bytes that a key's entry stands for."""
    return (packed & 0xFFFFFFFF) * UNIT


class Index:
    """The log and where each key's newest record lies in it.

    `entries` is guarded by `lock`, which the store owns; so are `read` and `segment`. `load`,
    `append` and `compact` are called by one thread at a time, without the lock. All raise OSError.
    """

    def __init__(self, folder: int, lock: Lock) -> None:
        """Raises OSError, Unsupported (a log of a newer schema)."""
        self.entries: dict[bytes, int] = {}
        self._segments: dict[bytes, dict[int, int]] = {}
        self._lock = lock
        self._folder = folder
        self._frames = 0
        self._generation = 0
        fd = os.open("index", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=folder)
        self._fds = [fd, -1]
        try:
            self._end = self._check_header(fd)
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def _check_header(fd: int) -> int:
        head = os.pread(fd, _HEADER.size, 0)
        if len(head) == _HEADER.size:
            magic, schema = _HEADER.unpack(head)
            if magic == _MAGIC:
                if schema > SCHEMA:
                    raise Unsupported(
                        "cache index",
                        f"written by a newer version (schema {schema}, this one reads {SCHEMA})",
                        "use that version, another cache directory, or remove this one",
                    )
                if schema == SCHEMA:
                    return _HEADER.size
        # Not ours, empty or damaged: losing cache is allowed.
        os.ftruncate(fd, 0)
        _write(fd, _HEADER.pack(_MAGIC, SCHEMA), 0)
        return _HEADER.size

    # -- reading the whole log

    def load(self) -> Loaded:
        """Read the log; ends with `entries` in order of first appearance, damage cut off."""
        start: Start | None = None
        clean = False
        for found in self._scan(self._fds[0], _HEADER.size):
            kind, number, key, offset, whole = found
            self._frames += 1
            clean = kind == Kind.CLEAN
            self._end = offset + len(whole)
            if kind == Kind.FILE:
                with self._lock:
                    self.entries[key] = offset << 33 | number
            elif kind == Kind.SEGMENT:
                with self._lock:
                    self._segments.setdefault(key, {})[number] = offset << 1
            elif kind == Kind.DROP:
                with self._lock:
                    self.entries.pop(key, None)
                    self._segments.pop(key, None)
            elif kind == Kind.START:
                try:
                    start = _decode_start(whole[_FRAME.size :])
                except msgspec.MsgspecError:
                    start = None
        if os.fstat(self._fds[0]).st_size != self._end:
            clean = False
            os.ftruncate(self._fds[0], self._end)
        return Loaded(start, clean and start is not None)

    @staticmethod
    def _scan(fd: int, offset: int) -> Iterator[_Found]:
        """Frames from `offset` to the first that does not check."""
        pending = b""
        base = offset
        unpack = _FRAME.unpack_from
        while data := os.pread(fd, _READ, base + len(pending)):
            pending += data
            view = memoryview(pending)
            at = 0
            while len(pending) - at >= _FRAME.size:
                check, length, kind, number, key = unpack(pending, at)
                end = at + _FRAME.size + length
                if length > _FRAME_MAX:
                    return
                if end > len(pending):
                    break
                if xxh3_64_intdigest(view[at + 4 : end]) & 0xFFFFFFFF != check:
                    return
                yield _Found(kind, number, key, base + at, pending[at:end])
                at = end
            view.release()
            pending = pending[at:]
            base += at

    # -- single records (under the lock)

    def read(self, key: bytes) -> Record | None:
        """The recorded state of a key; None when there is none or it does not check."""
        packed = self.entries.get(key)
        if packed is None or not packed >> 33:
            return None
        payload = self._payload(packed >> 33, packed >> 32 & 1, Kind.FILE, key)
        if payload is None:
            return None
        try:
            return decode_record(payload)
        except msgspec.MsgspecError:
            return None

    def segment(self, key: bytes, number: int) -> bytes | None:
        """Recorded hashes of one segment of a large file."""
        packed = self._segments.get(key, {}).get(number)
        if packed is None:
            return None
        return self._payload(packed >> 1, packed & 1, Kind.SEGMENT, key)

    def _payload(self, offset: int, generation: int, kind: Kind, key: bytes) -> bytes | None:
        fd = self._fds[generation]
        raw = os.pread(fd, _PEEK, offset)
        if len(raw) < _FRAME.size:
            return None
        check, length, found, _, name = _FRAME.unpack_from(raw)
        if found != kind or name != key or length > _FRAME_MAX:
            return None
        end = _FRAME.size + length
        if end > len(raw):
            raw = os.pread(fd, end, offset)
        raw = raw[:end]
        if len(raw) < end or xxh3_64_intdigest(memoryview(raw)[4:]) & 0xFFFFFFFF != check:
            return None
        return raw[_FRAME.size :]

    def recorded(self, key: bytes) -> bool:
        """Whether the log knows the key."""
        return self.entries.get(key, 0) >> 33 != NO_OFFSET

    def set_charge(self, key: bytes, units: int) -> None:
        """What a key's entry stands for from now on, whatever its record says."""
        packed = self.entries.get(key)
        if packed is not None:
            self.entries[key] = packed >> 32 << 32 | units

    def forget(self, key: bytes) -> None:
        """Take a key out of memory; its DROP frame is for the caller to append."""
        self.entries.pop(key, None)
        self._segments.pop(key, None)

    # -- writing (one thread)

    def append(self, frames: Iterable[Frame]) -> None:
        """Write frames, then let `entries` of keys that are still there point to them.

        On OSError (disk full, failing) nothing has changed but junk behind the end of the log,
        which the next append overwrites.
        """
        placed: list[tuple[Frame, int]] = []
        parts: list[bytes] = []
        offset = self._end
        for frame in frames:
            raw = _pack(frame)
            placed.append((frame, offset))
            parts.append(raw)
            offset += len(raw)
        if not parts:
            return
        fd = self._fds[self._generation]
        try:
            _write(fd, b"".join(parts), self._end)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._end)
            raise
        self._end = offset
        self._frames += len(placed)
        bit = self._generation
        with self._lock:
            for frame, where in placed:
                if frame.kind == Kind.FILE and frame.key in self.entries:
                    self.entries[frame.key] = where << 33 | bit << 32 | frame.number
                elif frame.kind == Kind.SEGMENT and frame.key in self.entries:
                    self._segments.setdefault(frame.key, {})[frame.number] = where << 1 | bit

    def sync(self) -> None:
        """Ask the disk to keep it: a courtesy at a clean stop."""
        os.fdatasync(self._fds[self._generation])

    def compact(self, start: Start) -> bool:
        """Rewrite the log without dead frames when those are the most; whether it was done."""
        with self._lock:
            live = len(self.entries) + sum(map(len, self._segments.values()))
        dead = self._frames - live
        if dead < _DEAD_MIN or dead < live:
            return False
        old, bit = self._fds[self._generation], 1 - self._generation
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        new = os.open("index.new", flags, 0o600, dir_fd=self._folder)
        try:
            head = _HEADER.pack(_MAGIC, SCHEMA) + _pack(start_frame(start))
            _write(new, head, 0)
            end, moved = self._copy_live(old, new, len(head), bit)
            os.rename("index.new", "index", src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            os.close(new)
            raise
        self._fds[bit] = new
        # In steps: readers find a key's record in either log, by the bit in its entry.
        for at in range(0, len(moved), _SWAP):
            with self._lock:
                for found, where in moved[at : at + _SWAP]:
                    self._move(found, where, bit)
        self._generation = bit
        self._end = end
        self._frames = len(moved) + 1
        self._fds[1 - bit] = -1
        os.close(old)
        return True

    def _copy_live(
        self, old: int, new: int, end: int, bit: int
    ) -> tuple[int, list[tuple[_Found, int]]]:
        moved: list[tuple[_Found, int]] = []
        parts: list[bytes] = []
        size = 0
        for found in self._scan(old, _HEADER.size):
            if found.kind == Kind.FILE:
                alive = self.entries.get(found.key, 0) >> 33 == found.offset
            elif found.kind == Kind.SEGMENT:
                alive = self._segments.get(found.key, {}).get(found.number, 0) >> 1 == found.offset
            else:
                alive = False
            if not alive:
                continue
            moved.append((found._replace(whole=b""), end + size))
            parts.append(found.whole)
            size += len(found.whole)
            if size >= _READ:
                _write(new, b"".join(parts), end)
                end += size
                parts, size = [], 0
        _write(new, b"".join(parts), end)
        return end + size, moved

    def _move(self, found: _Found, where: int, bit: int) -> None:
        if found.kind == Kind.FILE:
            packed = self.entries.get(found.key, 0)
            if packed >> 33 == found.offset and packed >> 32 & 1 != bit:
                self.entries[found.key] = where << 33 | bit << 32 | packed & 0xFFFFFFFF
            return
        segments = self._segments.get(found.key, {})
        packed = segments.get(found.number, 0)
        if packed >> 1 == found.offset and packed & 1 != bit:
            segments[found.number] = where << 1 | bit

    def close(self) -> None:
        """Close the log's files."""
        for n, fd in enumerate(self._fds):
            if fd >= 0:
                self._fds[n] = -1
                with contextlib.suppress(OSError):
                    os.close(fd)


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view = view[done:]
        offset += done
