"""What the namespace needs of the job queue: somebody who asks the sources."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from hsfs.core.errors import HsfsError
from hsfs.core.types import DeviceId, DirectoryPage, ObjectStat, Place


class Surveyor(Protocol):
    """Asks the sources through movers, as jobs of interactive priority."""

    def list(self, device: DeviceId, directory: Place) -> AsyncIterator[DirectoryPage]:
        """One native directory, page by page as they come. Raises NotFound (it is gone),
        NotADirectory, Unauthorised, Unavailable, TimedOut."""

    async def stat(
        self, device: DeviceId, places: Sequence[Place]
    ) -> Sequence[ObjectStat | HsfsError]:
        """One answer per place, in order. Raises Unavailable when no mover can ask."""
