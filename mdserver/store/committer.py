"""Group commit: one writer thread; all that is submitted while a commit flushes goes into the next.

No artificial delay. A flush costs the same for one transaction as for hundreds, so that concurrent
callers share it. A batch is bounded, so that an interactive change does not wait behind a whole
scan: its cost is the batch before it plus its own.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from hsfs.core.errors import Unavailable
from hsfs.mdserver.store import Changes, MetadataStore, Snapshot, Transaction

log = logging.getLogger(__name__)
T = TypeVar("T")

BATCH_MAX = 24  # transactions; one assimilates up to a few thousand entries
JOURNAL_KEEP = 20_000  # records; older ones make a client drop its cache instead of catching up
_TRIM_EVERY = 2_000


class _Job(Generic[T]):
    __slots__ = ("future", "loop", "transaction")

    def __init__(self, transaction: Transaction, loop: asyncio.AbstractEventLoop) -> None:
        self.transaction = transaction
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()


class Committer:
    """Runs transactions on the store from any event loop. Start it once, close it at the end."""

    def __init__(self, store: MetadataStore, *, journal_keep: int = JOURNAL_KEEP) -> None:
        self.store = store
        self._journal_keep = journal_keep
        self._trimmed_at = store.seq
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hsfs-committer", daemon=True)
        self._thread.start()

    async def submit(self, decide: Callable[[Snapshot], Changes]) -> object:
        """Run a pure transaction; its `result` once it is durable. A cancelled call may still be
        committed. Raises what the transaction raised, NoSpace, Unavailable."""
        if self._closed:
            raise Unavailable("metadata store", "it is being closed")
        job: _Job[object] = _Job(decide, asyncio.get_running_loop())
        self._jobs.put(job)
        return await job.future

    def close(self) -> None:
        """Blocking: finish what was submitted and end the thread."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        ending = False
        while not ending:
            job = self._jobs.get()
            batch: list[_Job[object]] = []
            while True:
                if job is None:
                    ending = True
                    break
                batch.append(job)
                if len(batch) == BATCH_MAX:
                    break
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
            if batch:
                self._commit(batch)

    def _commit(self, batch: list[_Job[object]]) -> None:
        outcomes: list[Changes | Exception]
        try:
            outcomes = self.store.transact([job.transaction for job in batch])
        except Exception as error:
            log.exception("metadata commit failed")
            outcomes = [error] * len(batch)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Job[object], Changes | Exception]]]
        by_loop = {}
        for job, outcome in zip(batch, outcomes, strict=True):
            by_loop.setdefault(job.loop, []).append((job, outcome))
        for loop, finished in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, finished)
            except RuntimeError:  # the loop is closed: nobody waits any more
                log.debug("a commit finished after its loop had closed")
        if self.store.seq - self._trimmed_at >= _TRIM_EVERY:
            self._trimmed_at = self.store.seq
            self._trim()

    def _trim(self) -> None:
        upto = self.store.seq - self._journal_keep
        if upto > 0:
            try:
                self.store.trim(upto)
            except Exception:
                log.exception("the journal could not be trimmed")


def _resolve(finished: list[tuple[_Job[object], Changes | Exception]]) -> None:
    for job, outcome in finished:
        if job.future.done():  # cancelled meanwhile
            continue
        if isinstance(outcome, Exception):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome.result)
