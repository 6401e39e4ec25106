"""Sessions of the metadata server: who is connected, what is pushed to them, and replies that are
kept for those who ask twice.

Pushes are read from the journal, one reader per subscribed session, each at its own pace: a slow
consumer costs no memory. One that falls `LAG_MAX` records behind, or behind the journal's floor, is
told to forget everything and goes on from now.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

import structlog

from hsfs.core.errors import Trimmed
from hsfs.core.ports import Invalidation
from hsfs.proto.frames import encode_push

log = structlog.get_logger("hsfs.mds.sessions")

LAG_MAX = 64 * 1024
_RECORDS_PER_FRAME = 4096
_KEPT_REPLIES = 1024


class Journal(Protocol):
    """What pushes are made of."""

    @property
    def seq(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    def watch(self, after: int) -> AsyncIterator[Sequence[Invalidation]]: ...


class Session:
    """One connection that has said HELLO. `key` names this connection, `client` whoever made it
    (`pid`: on this machine, 0 elsewhere); `send` writes a frame; `drained` returns when the
    connection takes more."""

    _made = 0

    def __init__(
        self,
        client: bytes,
        kind: str,
        pid: int,
        send: Callable[[bytes], None],
        drained: Callable[[], Awaitable[None]],
        close: Callable[[], None],
    ) -> None:
        Session._made += 1
        self.key = client + Session._made.to_bytes(8, "big")
        self.client = client
        self.kind = kind
        self.pid = pid
        self.heard_s = time.monotonic()
        self.send = send
        self.drained = drained
        self.close = close

    async def push(self, journal: Journal, after: int) -> None:
        """Push what comes behind `after`, until cancelled."""
        while True:
            try:
                after = await self._push_from(journal, after)
            except Trimmed:
                after = journal.seq
            log.info("a client was told to forget what it cached", kind=self.kind)
            self.send(encode_push(journal.epoch, after, after, None))

    async def _push_from(self, journal: Journal, after: int) -> int:
        """Returns the position to go on from when the client lags too far behind."""
        async for records in journal.watch(after):
            for at in range(0, len(records), _RECORDS_PER_FRAME):
                await self.drained()
                if journal.seq - after > LAG_MAX:
                    return journal.seq
                piece = tuple(records[at : at + _RECORDS_PER_FRAME])
                # A journal record can hold several invalidations: a frame ends with a whole one
                # only as far as the client's arithmetic is concerned, never short of it.
                last = max(piece[-1].seq, after)
                self.send(encode_push(journal.epoch, min(after + 1, last), last, piece))
                after = last
        return journal.seq


class Sessions:
    """All sessions, by client. A client that connects again replaces its older connection."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, Session] = {}
        self._replies: OrderedDict[tuple[bytes, bytes], asyncio.Task[Any]] = OrderedDict()
        self._last_client_s = time.monotonic()

    def add(self, session: Session) -> None:
        """Take a session in."""
        older = self._sessions.pop(session.client, None)
        self._sessions[session.client] = session
        if older is not None:
            older.close()

    def remove(self, session: Session) -> None:
        """The connection is gone. Idempotent."""
        if self._sessions.get(session.client) is session:
            del self._sessions[session.client]
            if session.kind != "mover":
                self._last_client_s = time.monotonic()

    def current(self, session: Session) -> bool:
        """Whether the session has not been replaced."""
        return self._sessions.get(session.client) is session

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def count(self, kind: str) -> int:
        """Sessions of a kind."""
        return sum(session.kind == kind for session in self._sessions.values())

    def heard_of(self, pid: int) -> float | None:
        """When (monotonic) a process of this machine was last heard of; None = no session."""
        heard = [session.heard_s for session in self._sessions.values() if session.pid == pid]
        return max(heard, default=None)

    def idle_s(self) -> float:
        """Seconds since the last session that was no mover's ended; 0 while there is one."""
        if any(session.kind != "mover" for session in self._sessions.values()):
            return 0.0
        return time.monotonic() - self._last_client_s

    async def once(
        self, client: bytes, request_id: bytes, work: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:  # noqa: ANN401
        """The result of `work`, which runs once per request id however often it is asked for: a
        client that lost its connection asks again and joins. Cancelling an asker leaves it be."""
        key = (client, request_id)
        task = self._replies.get(key)
        if task is None:
            task = self._replies[key] = asyncio.get_running_loop().create_task(work())
            if len(self._replies) > _KEPT_REPLIES:
                for old, kept in list(self._replies.items()):
                    if kept.done():
                        del self._replies[old]
                        break
        return await asyncio.shield(task)

    async def aclose(self) -> None:
        """End all connections and what they still wait for."""
        for session in self:
            session.close()
        for task in self._replies.values():
            task.cancel()
        await asyncio.gather(*self._replies.values(), return_exceptions=True)
