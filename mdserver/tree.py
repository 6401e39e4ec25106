"""Reading the tree: who wins a name, where a thing is natively, and what a client is told of it.

All functions work on one snapshot (or draft) and do not wait. A candidate of a backend counts only
while its directory is bound to that backend: what a vanished native directory leaves behind is
invisible at once and removed later.
"""

from __future__ import annotations

from collections.abc import Iterator

from hsfs.core.errors import NotADirectory, NotFound
from hsfs.core.names import PIECE_LEAD
from hsfs.core.types import (
    NAME_MAX,
    ROOT_INO,
    Attributes,
    FileType,
    Node,
    Place,
    Replica,
)
from hsfs.mdserver.freshness import known_since, sort_key
from hsfs.mdserver.schema import (
    FLAG_PIECE,
    SYNTHETIC,
    Binding,
    Coverage,
    Inode,
    after_prefix,
    coverage_key,
    decode_candidates,
    decode_coverage,
    decode_inode,
    decode_odd,
    dentry_prefix,
    inode_key,
    odd_key,
)
from hsfs.mdserver.store import Snapshot
from hsfs.mdserver.volume import DeviceFacts, Volume

DEPTH_MAX = 4096
_DIRECTORY = int(FileType.DIRECTORY)
_TYPES = {int(one): one for one in FileType}


class View:
    """The tree as one snapshot has it."""

    __slots__ = ("_places", "get", "snapshot", "volume")

    def __init__(self, snapshot: Snapshot, volume: Volume) -> None:
        self.snapshot = snapshot
        self.volume = volume
        self.get = snapshot.get
        self._places: dict[tuple[int, int], bytes | None] = {}  # native keys of directories

    def inode(self, ino: int) -> Inode | None:
        """The record, if there is one."""
        value = self.get(inode_key(ino))
        return None if value is None else decode_inode(value)

    def require(self, ino: int) -> Inode:
        """The record. Raises NotFound when the inode is gone or lost its place."""
        record = self.inode(ino)
        if record is None or not record.bindings:
            raise NotFound(f"inode {ino}")
        return record

    def directory(self, ino: int) -> Inode:
        """The record of a directory. Raises NotFound, NotADirectory."""
        record = self.require(ino)
        if record.type != _DIRECTORY:
            raise NotADirectory(f"inode {ino}")
        if not self._stands(ino, record):
            raise NotFound(f"inode {ino}")
        return record

    def _stands(self, ino: int, record: Inode) -> bool:
        """Whether a directory still has a place: hsfs made it, or a backend has it and all above
        it."""
        if record.flags & FLAG_PIECE:
            ino, record, _ = self.owner(ino, record)
        for binding in record.bindings:
            if binding.device == SYNTHETIC:
                return True
            facts = self.volume.get(binding.device)
            if facts is not None and self.directory_key(facts, ino) is not None:
                return True
        return False

    def owner(self, ino: int, record: Inode) -> tuple[int, Inode, tuple[bytes, ...]]:
        """The directory whose long names a `%~+` directory holds (itself if it is none), and the
        pieces on the way down from there."""
        pieces: list[bytes] = []
        while record.flags & FLAG_PIECE:
            binding = record.bindings[0]
            pieces.append(binding.segment)
            ino = binding.directory
            record = self.require(ino)
        pieces.reverse()
        return ino, record, tuple(pieces)

    def devices(self, ino: int, owner: Inode) -> frozenset[int]:
        """Whose candidates count in a directory: those of backends that have it, and all above
        it."""
        out = [SYNTHETIC]
        for binding in owner.bindings:
            facts = self.volume.get(binding.device)
            if facts is not None and self.directory_key(facts, ino) is not None:
                out.append(binding.device)
        return frozenset(out)

    def candidates(self, parent: int, name: bytes) -> tuple[int, ...]:
        """(1, device, ino, type, ...); empty when nothing has the name."""
        value = self.get(dentry_prefix(parent) + name)
        return () if value is None else decode_candidates(value)

    def shown(
        self, name: bytes, candidates: tuple[int, ...], devices: frozenset[int]
    ) -> tuple[int, int] | None:
        """(ino, type) of what has the name: the winner, but no `%~+` directory whose files have all
        lost their backend."""
        found = self.winner(candidates, devices)
        if found is not None and name.startswith(PIECE_LEAD) and not self._used(found[0], devices):
            return None
        return found

    def _used(self, piece: int, devices: frozenset[int]) -> bool:
        return any(True for _ in self.children(piece, b"", b"", devices))

    def winner(
        self, candidates: tuple[int, ...], devices: frozenset[int]
    ) -> tuple[int, int] | None:
        """(ino, type) of the candidate that is shown: a directory before all, then by order."""
        best: tuple[tuple[bool, tuple[int, int]], tuple[int, int]] | None = None
        for at in range(1, len(candidates), 3):
            device, ino, kind = candidates[at : at + 3]
            if device not in devices:
                continue
            if len(candidates) == 4:
                return ino, kind
            facts = self.volume.get(device)
            rank = (kind != _DIRECTORY, facts.order if facts is not None else (-1, -1))
            if best is None or rank < best[0]:
                best = rank, (ino, kind)
        return None if best is None else best[1]

    def child(self, parent: int, name: bytes) -> tuple[int, int] | None:
        """(ino, type) under a name. Raises NotFound (the parent), NotADirectory."""
        record = self.directory(parent)
        if len(name) > NAME_MAX:
            return None
        candidates = self.candidates(parent, name)
        if not candidates:
            return None
        owner, owner_record, _ = self.owner(parent, record)
        return self.shown(name, candidates, self.devices(owner, owner_record))

    def children(
        self, parent: int, after: bytes, upto: bytes, devices: frozenset[int]
    ) -> Iterator[tuple[bytes, int]]:
        """(name, ino) behind `after`, below `upto` (b"" = all). Names that begin with an escape
        come last, the others in byte order before them."""
        prefix = dentry_prefix(parent)
        skip = len(prefix)
        low, end = prefix + b"%~", prefix + b"%\x7f"
        if not after.startswith(b"%~"):
            for key, value in self._between(prefix, after, upto):
                if low <= key < end:
                    continue
                shown = self.winner(decode_candidates(value), devices)
                if shown is not None:
                    yield key[skip:], shown[0]
            if upto:
                return
            after = b""
        first = prefix + after + b"\0" if after else low
        for key, value in self.snapshot.range(first, end):
            shown = self.shown(key[skip:], decode_candidates(value), devices)
            if shown is not None:
                yield key[skip:], shown[0]

    def _between(self, prefix: bytes, after: bytes, upto: bytes) -> Iterator[tuple[bytes, bytes]]:
        low = prefix + after + b"\0" if after else prefix
        high = prefix + upto if upto else after_prefix(prefix)
        return self.snapshot.range(low, high)

    def coverage(self, directory: int, device: int) -> Coverage | None:
        """What is known of a native directory."""
        value = self.get(coverage_key(directory, device))
        return None if value is None else decode_coverage(value)

    # Native places

    def directory_key(self, device: DeviceFacts, ino: int) -> bytes | None:
        """Native key of a directory; None when it has none any more."""
        found = self._places.get((device.id, ino), b"?")
        if found != b"?":
            return found
        segments: list[bytes] = []
        at = ino
        key: bytes | None = None
        for _ in range(DEPTH_MAX):
            record = self.inode(at)
            binding = None if record is None else binding_of(record, device.id)
            if binding is None:
                break
            if not binding.directory:
                segments.reverse()
                key = b"/".join(segments)
                if device.flat and segments:
                    key += b"/"
                break
            segments.append(binding.segment)
            at = binding.directory
        self._places[(device.id, ino)] = key
        return key

    def directory_place(self, device: DeviceFacts, ino: int, record: Inode) -> Place | None:
        """Where a backend keeps a directory."""
        key = self.directory_key(device, ino)
        binding = binding_of(record, device.id)
        return None if key is None or binding is None else Place(key, binding.handle)

    def place(self, device: DeviceFacts, binding: Binding) -> Place | None:
        """Where a backend keeps what is bound there (no directory of an object store)."""
        key = self.directory_key(device, binding.directory)
        if key is None:
            return None
        if not device.flat and key:
            key += b"/"
        return Place(key + binding.segment, binding.handle)

    def file_place(self, device: DeviceFacts, record: Inode) -> Place | None:
        """Where a backend keeps a file, by the first of its names that still has a directory."""
        for binding in record.bindings:
            if binding.device == device.id:
                place = self.place(device, binding)
                if place is not None:
                    return place
        return None

    def shown_at(self, binding: Binding, kind: int) -> tuple[int, bytes] | None:
        """(parent, name) in the tree of what is bound there; None at the root of a backend."""
        if not binding.directory:
            return None
        if binding.device == SYNTHETIC:
            return binding.directory, binding.segment
        facts = self.volume.get(binding.device)
        key = sort_key(binding.segment, kind, facts is not None and facts.flat)
        value = self.get(odd_key(binding.device, binding.directory, key))
        if value is not None:
            odd = decode_odd(value)
            return odd.parent, odd.name
        return binding.directory, binding.segment

    def location(self, record: Inode) -> tuple[int, bytes] | None:
        """(parent, name) of an inode; None for the root."""
        active = self.volume.active
        for binding in record.bindings:
            if binding.device in active:
                found = self.shown_at(binding, record.type)
                if found is not None:
                    return found
        return None

    def path(self, ino: int) -> bytes:
        """Absolute path in the mount. Raises NotFound."""
        names: list[bytes] = []
        for _ in range(DEPTH_MAX):
            if ino == ROOT_INO:
                return b"/" + b"/".join(reversed(names))
            found = self.location(self.require(ino))
            if found is None:
                break
            ino = found[0]
            names.append(found[1])
        raise NotFound(f"inode {ino}")

    # What clients are told

    def seen_at(self, record: Inode) -> int:
        """When the source last spoke of a file (ns), by itself or in its directory's listing."""
        as_of_ns = record.as_of_ns
        for binding in record.bindings:
            if binding.directory and binding.device != SYNTHETIC:
                coverage = self.coverage(binding.directory, binding.device)
                facts = self.volume.get(binding.device)
                key = sort_key(binding.segment, record.type, facts is not None and facts.flat)
                as_of_ns = max(as_of_ns, known_since(coverage, key))
        return as_of_ns

    def device_of(self, record: Inode) -> DeviceFacts | None:
        """The backend that describes an inode: the first in order that has it."""
        best: DeviceFacts | None = None
        for binding in record.bindings:
            facts = self.volume.get(binding.device)
            if facts is not None and (best is None or facts.order < best.order):
                best = facts
        return best

    def node(
        self, ino: int, record: Inode, as_of_ns: int, ttl_s: float, stale: bool = False
    ) -> Node:
        """What a client is told. Raises NotFound when the native place is gone."""
        kind = _TYPES[record.type]
        device = self.device_of(record)
        defaults = self.volume.defaults if device is None else device
        replicas: tuple[Replica, ...] = ()
        parent = 0
        mode, nlink = record.mode, record.nlink
        if kind is FileType.DIRECTORY:
            if not self._stands(ino, record):
                raise NotFound(f"inode {ino}")
            found = self.location(record)
            parent = found[0] if found is not None else int(ROOT_INO)
            nlink = 1  # `find` then counts no subdirectories
            if mode < 0:
                mode = defaults.dir_mode
        else:
            if device is None:
                raise NotFound(f"inode {ino}", "its backend is no longer part of the volume")
            place = self.file_place(device, record)
            if place is None:
                raise NotFound(f"inode {ino}")
            if kind is FileType.FILE:
                replicas = (Replica(device.id, place, record.version),)
            if mode < 0:
                mode = defaults.file_mode
        return Node(
            Attributes(
                ino,
                kind,
                mode,
                record.uid if record.uid >= 0 else defaults.uid,
                record.gid if record.gid >= 0 else defaults.gid,
                nlink,
                record.size,
                record.mtime_ns,
                record.mtime_ns,
                record.ctime_ns or record.mtime_ns,
                record.rdev,
            ),
            record.version,
            record.change,
            as_of_ns,
            ttl_s,
            replicas,
            record.target,
            stale,
            parent,
        )


def binding_of(record: Inode, device: int) -> Binding | None:
    """The native place on one backend."""
    for binding in record.bindings:
        if binding.device == device:
            return binding
    return None
