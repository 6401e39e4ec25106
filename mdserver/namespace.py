"""The namespace as the server's operations see it, and what it needs of the job queue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from hsfs.core.errors import HsfsError
from hsfs.core.ports import Device, Invalidation, Listing
from hsfs.core.types import (
    DeviceId,
    DirectoryPage,
    Info,
    Ino,
    Name,
    Node,
    ObjectStat,
    Place,
    Space,
    Version,
)


class BackendDefinition(Protocol):
    """A backend as the volume file or the command line defines it."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def at(self) -> str: ...
    @property
    def options(self) -> Mapping[str, str | int | float | bool]: ...


class Surveyor(Protocol):
    """Asks the sources through movers, as jobs of interactive priority."""

    def list(self, device: DeviceId, directory: Place) -> AsyncIterator[DirectoryPage]:
        """One native directory, page by page as they come. Raises NotFound (it is gone),
        NotADirectory, Unauthorised, Unavailable, TimedOut."""

    async def stat(
        self, device: DeviceId, places: Sequence[Place]
    ) -> Sequence[ObjectStat | HsfsError]:
        """One answer per place, in order. Raises Unavailable when no mover can ask."""


class NamespaceOperations(Protocol):
    """What `Namespace` offers: `async with Namespace(store, committer, volume, surveyor)`.

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
