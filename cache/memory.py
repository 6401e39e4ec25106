"""The ChunkStore in memory: the double of unit and model tests. Same suite as the one on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock

from hsfs.cache.directory import key_of
from hsfs.cache.eviction import Sieve
from hsfs.cache.file import charge_for
from hsfs.core import blocks
from hsfs.core.errors import Corrupt, NoSpace
from hsfs.core.ports import CachedFile, CacheUsage
from hsfs.core.types import BLOCK_SIZE, CHUNK_SIZE, Extent, FileVersion, Ino

_PIECE = 1 << 20


class MemoryStore:
    """Bounded like the real one; what was filled is right by definition."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = RLock()
        self._files: dict[bytes, _File] = {}
        self._sieve = Sieve()
        self._used = 0
        self._evicted = 0

    def find(self, file: FileVersion) -> CachedFile | None:
        with self._lock:
            found = self._files.get(key_of(file))
            if found is None:
                return None
            self._sieve.touch(found.key)
            return _Handle(self, found)

    def create(self, file: FileVersion) -> CachedFile:
        with self._lock:
            found = self.find(file)
            if found is not None:
                return found
            charge = min(charge_for(file.size), CHUNK_SIZE)
            self.reserve(charge)
            made = _File(key_of(file), file, charge)
            self._files[made.key] = made
            self._sieve.add(made.key)
            return _Handle(self, made)

    def cached_bytes(self, file: FileVersion) -> int:
        with self._lock:
            found = self._files.get(key_of(file))
            return found.cached_bytes() if found is not None else 0

    def evict(self, inos: Sequence[Ino]) -> int:
        wanted = set(inos)
        with self._lock:
            chosen = [
                f for f in self._files.values() if not f.pins and (not wanted or f.ino in wanted)
            ]
            for file in chosen:
                self._sieve.discard(file.key)
            return sum(self._drop(file) for file in chosen)

    def usage(self) -> CacheUsage:
        with self._lock:
            pinned = sum(1 for f in self._files.values() if f.pins)
            return CacheUsage(self._used, len(self._files), self._size, pinned, self._evicted)

    def flush(self) -> None:
        """Nothing to persist."""

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._files.clear()

    def reserve(self, size: int) -> None:
        """Count bytes as used, evicting for them. Raises NoSpace."""
        with self._lock:
            while self._used + size > self._size:
                key = self._sieve.evict(lambda k: not self._files[k].pins)
                if key is None:
                    raise NoSpace("memory cache", f"no room for {size} bytes")
                self._drop(self._files[key])
            self._used += size

    def admit(self, file: _File, count: int) -> None:
        """Reserve what `count` more blocks of the file need. Raises NoSpace."""
        with self._lock:
            held = (len(file.states) - file.states.count(0) + file.inflight + count) * BLOCK_SIZE
            more = min(held, charge_for(file.file.size)) - file.charge
            if more > 0:
                self.reserve(more)
                file.charge += more
            file.inflight += count

    def settle(self, file: _File, count: int) -> None:
        """Admitted blocks are there, or given up."""
        with self._lock:
            file.inflight -= count

    def unpin(self, file: _File) -> None:
        """A holder has gone."""
        with self._lock:
            file.pins -= 1

    def pin(self, file: _File) -> None:
        """A holder has come."""
        with self._lock:
            file.pins += 1

    def _drop(self, file: _File) -> int:
        del self._files[file.key]
        self._used -= file.charge
        self._evicted += file.charge
        return file.charge


class _File:
    def __init__(self, key: bytes, file: FileVersion, charge: int) -> None:
        self.key = key
        self.file = file
        self.ino = file.ino
        self.charge = charge
        self.pins = 0
        self.inflight = 0
        self.states = bytearray(blocks.block_count(file.size))
        self.parts: dict[int, bytes] = {}

    def cached_bytes(self) -> int:
        return sum(
            blocks.block_extent(i, self.file.size).length for i, s in enumerate(self.states) if s
        )


class _Handle:
    def __init__(self, store: MemoryStore, file: _File) -> None:
        self._store = store
        self._file = file
        self._released = False
        store.pin(file)

    @property
    def file(self) -> FileVersion:
        return self._file.file

    @property
    def complete(self) -> bool:
        return 0 not in self._file.states

    def missing(self, extent: Extent) -> Sequence[Extent]:
        return blocks.missing(self._file.states, extent, self.file.size)

    def fill(self, extent: Extent, read: Callable[[int, memoryview], int]) -> None:
        file = self._file
        if not blocks.is_aligned(extent, self.file.size):
            raise ValueError(f"{extent} is not made of blocks of a file of {self.file.size} bytes")
        holes = self.missing(extent)
        count = sum(blocks.block_count(hole.length) for hole in holes)
        self._store.admit(file, count)
        try:
            for hole in holes:
                for piece in _pieces(hole):
                    self._fill_piece(piece, read)
        finally:
            self._store.settle(file, count)

    def _fill_piece(self, piece: Extent, read: Callable[[int, memoryview], int]) -> None:
        buffer = memoryview(bytearray(piece.length))
        got = read(piece.offset, buffer)
        if got != piece.length:
            raise Corrupt("cache", f"the source gave {got} of {piece.length} bytes")
        for index in range(*blocks.block_span(piece.offset, piece.length)):
            at = index * BLOCK_SIZE - piece.offset
            self._file.parts[index] = bytes(buffer[at : at + BLOCK_SIZE])
            self._file.states[index] = 1

    def read_cached(self, offset: int, size: int) -> bytes | None:
        inside = blocks.clip(Extent(offset, size), self.file.size)
        first, last = blocks.block_span(inside.offset, inside.length)
        if self._file.states.find(0, first, last) >= 0:
            return None
        data = b"".join(self._file.parts[i] for i in range(first, last))
        at = inside.offset - first * BLOCK_SIZE
        return data[at : at + inside.length]

    def read(self, offset: int, size: int) -> bytes:
        data = self.read_cached(offset, size)
        if data is None:
            raise Corrupt("cache", "block is not in the cache")
        return data

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._store.unpin(self._file)


def _pieces(extent: Extent) -> list[Extent]:
    return [
        Extent(at, min(_PIECE, extent.end - at)) for at in range(extent.offset, extent.end, _PIECE)
    ]
