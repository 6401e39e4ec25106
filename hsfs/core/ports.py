"""Every Protocol through which layers meet. Concrete classes are wired in `hsfs.cli` only.

Concurrency contract: `async` methods are for the process's event loop (trio in mount and mover,
asyncio in the metadata server) and are cancellable; methods documented as *blocking* run in worker
threads and end early when their `Interrupt` is set; all others return at once and belong to the
loop thread unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from hsfs.core.types import (
    Capabilities,
    Cursor,
    DeviceId,
    Entry,
    Extent,
    FileVersion,
    Ino,
    Name,
    Node,
    ObjectStat,
    Page,
    Place,
    Space,
    Version,
    Wire,
)


class Interrupt(Protocol):
    """Ends a blocking call from another thread."""

    def attach(self, stop: Callable[[], None]) -> None:
        """Call `stop` when interrupted (at once if that has happened). One at a time."""

    def detach(self) -> None:
        """Forget the attached callable; afterwards it will not be called any more."""

    @property
    def interrupted(self) -> bool:
        """Whether the caller has gone away."""


class Backend(Protocol):
    """A place where bytes already live: idempotent, concurrent, safe to call from many tasks.

    Raises leaves of HsfsError: NotFound, StaleHandle, StaleVersion, Unauthorised, Unavailable,
    Throttled, TimedOut (no progress for the backend's timeout), Corrupt, NotADirectory,
    IsADirectory, NotSupported.
    """

    @property
    def device(self) -> DeviceId: ...

    @property
    def caps(self) -> Capabilities: ...

    async def stat(self, place: Place) -> ObjectStat:
        """Attributes and version as the source has them now."""

    def read_into(
        self,
        place: Place,
        offset: int,
        buf: memoryview,
        /,
        *,
        expect: Version | None,
        interrupt: Interrupt,
    ) -> int:
        """Blocking: fill `buf` from `offset`; fewer bytes than len(buf) only at the end of the
        content. With `expect`, raises StaleVersion unless the bytes are proven to belong to that
        version (as far as `caps.pinned_reads` goes). Nothing in `buf` may be used after an error.
        """

    def scan(self, directory: Place, *, after: Cursor | None = None) -> AsyncIterator[Page]:
        """One level of the tree, page by page; `after` resumes behind an earlier page."""

    async def probe(self) -> Space:
        """One round trip that proves reachability and authority; free space where known."""

    async def aclose(self) -> None:
        """Close connections; blocking reads in flight end with Unavailable."""


class FlatLister(Protocol):
    """Optional power of object stores (`caps.flat_list`): list a whole prefix, sharded."""

    def list_flat(self, prefix: Place, *, after: Cursor | None = None) -> AsyncIterator[Page]:
        """All keys below `prefix` in byte order; entries carry full keys in `place`, `name` b""."""


class Announcer(Protocol):
    """Optional power (`caps.announces`): one request for a range that is read in pieces."""

    def announce(self, place: Place, extent: Extent, /) -> None:
        """A hint, any thread: `read_into` is about to be called for the whole extent, in order and
        without gaps, each call beginning where the one before ended. Costs nothing if it does not
        happen."""


class CachedFile(Protocol):
    """One pinned cache file of one FileVersion. Never evicted before `release`."""

    @property
    def file(self) -> FileVersion: ...

    @property
    def complete(self) -> bool:
        """All blocks are present and verified."""

    def missing(self, extent: Extent) -> Sequence[Extent]:
        """Block-aligned (but for the end of file) holes of the extent; thread-safe."""

    def fill(self, extent: Extent, read: Callable[[int, memoryview], int]) -> None:
        """Blocking: fetch a block-aligned extent by `read(offset, buf) -> n`, hash each block,
        write it, mark it present. `read` may be called with pieces of up to 1 MiB in order.
        Safe from several threads for disjoint extents. Raises what `read` raises, Corrupt on a
        short read, NoSpace, CacheUnavailable; blocks that are already marked stay."""

    def read_cached(self, offset: int, size: int) -> bytes | None:
        """Bytes of verified blocks if they are there without waiting for the disk, else None."""

    def read(self, offset: int, size: int) -> bytes:
        """Blocking: bytes of verified blocks. Raises Corrupt (the block is dropped and counts as
        missing again) or CacheUnavailable."""

    def release(self) -> None:
        """Unpin. Idempotent."""


class ChunkStore(Protocol):
    """Tier 0: keyed by FileVersion, never stale by construction; knows no backend."""

    def find(self, file: FileVersion) -> CachedFile | None:
        """Pin what is cached of the file, if anything is. Does not touch the disk when the file is
        already open; may open it otherwise."""

    def create(self, file: FileVersion) -> CachedFile:
        """Blocking: pin, making the cache file and reserving its size when new (evicts others).
        Raises NoSpace when it can't fit, CacheUnavailable."""

    def cached_bytes(self, file: FileVersion) -> int:
        """Verified bytes of the file in Tier 0."""

    def evict(self, inos: Sequence[Ino]) -> int:
        """Blocking: drop unpinned cache files of these inodes (all when empty); bytes freed."""

    def usage(self) -> CacheUsage:
        """Counters for status and stats."""

    def flush(self) -> None:
        """Blocking: persist the index."""

    def close(self) -> None:
        """Blocking: flush, mark a clean stop, close all files."""


class CacheUsage(Wire, frozen=True, array_like=True, gc=False):
    """State of Tier 0: bytes and files held, its bound, and why it is not in use, if so."""

    bytes: int = 0
    files: int = 0
    size: int = 0
    pinned: int = 0
    evicted_bytes: int = 0
    trouble: str = ""


class Invalidation(Wire, frozen=True, array_like=True, gc=False):
    """One up-call of the metadata server: something a client may have cached has changed.

    `ino` 0 = drop everything. `name` b"" = the inode itself (attributes, content version);
    otherwise the dentry (`ino` is the directory).
    """

    ino: int
    name: bytes = b""
    seq: int = 0


class Device(Wire, frozen=True, array_like=True, gc=False):
    """A backend as the metadata server hands it out: everything but secrets."""

    id: int
    name: str
    url: str
    at: str
    options: dict[str, str | int | float | bool]
    state: str = "unknown"  # ok | unreachable | unauthorised | missing | unknown
    why: str = ""
    as_of_ns: int = 0
    scanned: int = 0  # entries assimilated
    scan_state: str = ""  # "" | running | done | lazy | failed


class Listing(Wire, frozen=True, array_like=True, gc=False):
    """A page of a directory of the namespace. `more` false = the end."""

    entries: tuple[Entry, ...]
    more: bool
    change: int = 0


class Mds(Protocol):
    """What a front needs of the metadata server.

    Every method may raise Unavailable, TimedOut (no progress) or LeaseLost besides its own errors.
    Freshness is the server's business: answers are revalidated at the source when they are due.
    """

    async def lookup(self, parent: Ino, name: Name) -> Node:
        """Raises NotFound, NotADirectory."""

    async def getattr(self, ino: Ino) -> Node:
        """Raises NotFound (the inode is gone)."""

    async def list(self, ino: Ino, after: Name, limit: int) -> Listing:
        """Entries in byte order behind `after` (b"" = from the start), at most 256."""

    async def revalidate(self, ino: Ino, version: Version) -> Node:
        """Ask the source now: a read met another version than `version`. Raises NotFound."""

    async def refresh(self, ino: Ino, recursive: bool) -> int:
        """Ask the source about everything at or below; returns the number of entries seen."""

    async def devices(self) -> Sequence[Device]:
        """All backends with their state."""

    async def space(self) -> Space:
        """statfs."""

    async def report(self, device: DeviceId, state: str, why: str) -> None:
        """A client's word on a backend's health, for `status`."""

    def invalidations(self) -> AsyncIterator[Sequence[Invalidation]]:
        """Up-calls, one consumer. Lease loss or a gap arrives as Invalidation(ino=0)."""
