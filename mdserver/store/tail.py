"""What engines share: the end of the journal, watched by tasks and moved by the writer thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from hsfs.mdserver.store import JOURNAL, Record

PAGE = 1024


def journal_key(seq: int) -> bytes:
    """Key of one record."""
    return JOURNAL + seq.to_bytes(8, "big")


class Tail:
    """Wakes watchers when the journal has grown. `moved` is called by the thread that committed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def moved(self) -> None:
        """Records were committed."""
        with self._lock:
            for event, loop in list(self._watchers.items()):
                try:
                    loop.call_soon_threadsafe(event.set)
                except RuntimeError:  # that loop is closed; its watcher is gone
                    del self._watchers[event]

    async def watch(
        self, records: Callable[[int, int], Sequence[Record]], after: int
    ) -> AsyncIterator[Sequence[Record]]:
        """Pages of `records(after, limit)`, for ever."""
        event = asyncio.Event()
        with self._lock:
            self._watchers[event] = asyncio.get_running_loop()
        try:
            while True:
                event.clear()
                while found := records(after, PAGE):
                    yield found
                    after = found[-1].seq
                await event.wait()
        finally:
            with self._lock:
                self._watchers.pop(event, None)
