"""Results on their way to the metadata server: in order, a few batches ahead of its answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hsfs.core.jobs import Job
from hsfs.core.types import DirectoryPage
from hsfs.mover.listing import BYTES_MAX, ENTRIES_MAX, entry_bytes
from hsfs.rpc.client import MdsClient, Pending

AHEAD = 4
_PAGES_MAX = 500


class Delivery:
    """Of one job. With `gather`, small pages wait for others until `flush` is called (or they are
    too much for a message): the caller looks at `full`.

    All methods raise LeaseLost when the job is no longer ours.
    """

    def __init__(self, client: MdsClient, job: Job, *, gather: bool) -> None:
        self._client = client
        self._job = job
        self._gather = gather
        self._pending: deque[Pending] = deque()
        self._pages: list[DirectoryPage] = []
        self._entries = 0
        self._bytes = 0

    async def __call__(self, pages: Sequence[DirectoryPage]) -> None:
        """Take pages (each fits into a message); waits when too much is unanswered."""
        for page in pages:
            size = 60 + sum(map(entry_bytes, page.entries))
            if self._bytes + size > BYTES_MAX:
                await self.flush()
            self._pages.append(page)
            self._entries += len(page.entries)
            self._bytes += size
            if self._entries >= 2 * ENTRIES_MAX:
                await self.flush()
        if not self._gather:
            await self.flush()

    @property
    def full(self) -> bool:
        """Whether what was gathered makes a message."""
        return self._entries >= ENTRIES_MAX or len(self._pages) >= _PAGES_MAX

    async def flush(self, cursor: bytes = b"") -> None:
        """Send what was gathered; the scan goes on behind it at `cursor`."""
        if not self._pages and not cursor:
            return
        pages, self._pages = tuple(self._pages), []
        self._entries = self._bytes = 0
        self._pending.append(self._client.send_pages(self._job, pages, cursor))
        while len(self._pending) > AHEAD:
            await self._pending[0].wait()
            self._pending.popleft()

    async def drain(self) -> None:
        """Send the rest and wait for all answers."""
        await self.flush()
        while self._pending:
            await self._pending[0].wait()
            self._pending.popleft()
