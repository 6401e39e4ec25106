"""Values that cross layers: numbers, names, attributes, places, listings.

Values that also travel over the metadata RPC or stand in the store are msgspec structs encoded as
arrays: fields are only ever appended, with defaults. Names and keys are bytes end to end. Times are
nanoseconds since the epoch, sizes bytes, ranges half-open.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

import msgspec

Ino = NewType("Ino", int)  # 64 bit, never reused
Name = NewType("Name", bytes)  # one path segment as the mount shows it
Key = NewType("Key", bytes)  # where a backend keeps it; see Place
Version = NewType("Version", bytes)  # foreign version of the content; equal = same bytes
DeviceId = NewType("DeviceId", int)  # a backend, as numbered by the metadata server
Cursor = NewType("Cursor", bytes)  # opaque resume point of a listing

ROOT_INO = Ino(1)
BLOCK_SIZE = 128 * 1024  # unit of verification and of random fetch
CHUNK_SIZE = 4 * 1024 * 1024  # unit of sequential fetch and of striping
NAME_MAX = 255


class FileType(IntEnum):
    """What an inode is. Values are stored and sent: never renumbered."""

    FILE = 1
    DIRECTORY = 2
    SYMLINK = 3
    FIFO = 4
    SOCKET = 5
    CHARACTER = 6
    BLOCK = 7


class Wire(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of values that travel or are stored: an array, append-only, validated on decode."""


class Place(Wire, frozen=True, array_like=True, gc=False):
    """Where a backend keeps one thing, relative to the URL that it was added with.

    `key`: object stores: the object key below the URL's prefix, exactly (a directory is a prefix
    that ends in `/`); hierarchical backends: path segments joined with `/`, no trailing slash. The
    backend's root is b"". `handle`: native handle (NFSv3 file handle), b"" where there is none;
    a backend prefers the handle and falls back to the key.
    """

    key: bytes
    handle: bytes = b""


class ObjectStat(Wire, frozen=True, array_like=True, gc=False):
    """One thing as its backend describes it: an entry of a listing or the answer of a stat.

    `name`: the raw last segment (object stores: without the trailing `/` of a prefix).
    `identity`: (fsid, fileid) packed for NFS and local files, b"" for object stores (there the key
    is the identity). `mode` (permission bits), `uid`, `gid` are -1 where the backend has none.
    `version` is b"" for directories. `strong` is false while the version may still change
    without being noticed (a ctime under 2 s old).
    """

    name: bytes
    type: FileType
    place: Place
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    version: bytes = b""
    identity: bytes = b""
    mode: int = -1
    uid: int = -1
    gid: int = -1
    nlink: int = 1
    target: bytes = b""  # symlink target
    rdev: int = 0
    strong: bool = True


class Page(Wire, frozen=True, array_like=True, gc=False):
    """One page of one directory's listing. `cursor` b"" = the last page."""

    entries: tuple[ObjectStat, ...]
    cursor: bytes = b""


class Attributes(Wire, frozen=True, array_like=True, gc=False):
    """POSIX attributes of an inode. `mode` holds the permission bits only."""

    ino: int
    type: FileType
    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    rdev: int = 0


class Replica(Wire, frozen=True, array_like=True, gc=False):
    """One copy of a file's content on one device, pinned to a version."""

    device: int
    place: Place
    version: bytes
    proven: bool = True


class Node(Wire, frozen=True, array_like=True, gc=False):
    """All that a client needs of an inode to stat, open and read it without asking again.

    `version`: content version (b"" for anything but files). `change`: grows with every change of
    the inode's record. `as_of_ns`: when the source last confirmed it. `ttl_s`: for how many
    seconds from the reply it may be used without asking again (freshness left, at most the
    lease). `stale`: the source is unreachable and `stale_ok` lets old knowledge stand.
    """

    attributes: Attributes
    version: bytes = b""
    change: int = 0
    as_of_ns: int = 0
    ttl_s: float = 0.0
    replicas: tuple[Replica, ...] = ()
    target: bytes = b""
    stale: bool = False
    parent: int = 0  # directories: for `..`


class Entry(Wire, frozen=True, array_like=True, gc=False):
    """A dentry with its inode, as readdirplus gives it."""

    name: bytes
    node: Node


class Info(Wire, frozen=True, array_like=True, gc=False):
    """All that the metadata server knows of one inode, for `hsfs info`.

    `path`: in the mount. `bindings`: every native place (directories: one per backend that has
    it). `losers`: what backends of lower priority keep under the same name, hidden by it.
    """

    path: bytes
    node: Node
    bindings: tuple[Replica, ...] = ()
    losers: tuple[Replica, ...] = ()


class DirectoryPage(Wire, frozen=True, array_like=True, gc=False):
    """What a mover reports of one native directory.

    `entries` are sorted by raw native name (object stores: by key segment, prefixes compared with
    their trailing `/`). The page is the whole truth about the range (`after`, `upto`] of raw names:
    what the store knows there and the page lacks is gone. `upto` b"" = to the end. With
    `adds_only` the page says nothing about absence. `names_only` pages prune: entries carry names
    without attributes and only absence counts. `as_of_ns`: when the listing of it began.
    """

    device: int
    directory: Place
    entries: tuple[ObjectStat, ...]
    after: bytes = b""
    upto: bytes = b""
    as_of_ns: int = 0
    adds_only: bool = False
    names_only: bool = False


class Space(Wire, frozen=True, array_like=True, gc=False):
    """What statfs answers; `known` is false where no backend can say."""

    total: int
    free: int
    available: int
    files: int = 0
    files_free: int = 0
    known: bool = True


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + length) of a file."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte behind the extent."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class FileVersion:
    """Key of Tier 0: one content version of one inode; `size` in bytes belongs to it."""

    ino: Ino
    version: Version
    size: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; data, so that no caller asks for a class."""

    flat: bool  # object store: keys, prefixes as directories
    ordered: bool  # listings come in byte order of the raw names
    strong_versions: bool  # a version names the bytes (ETag, generation)
    has_handles: bool  # places carry native handles
    pinned_reads: bool  # read_into can prove the version it read
    concurrency: int  # useful parallel requests
    read_max: int  # largest useful single read (bytes)
    flat_list: bool = False  # has a FlatLister
    announces: bool = False  # is an Announcer: telling it of a sequence saves requests
