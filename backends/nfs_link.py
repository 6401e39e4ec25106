"""The metadata connection: NFSv3 calls from any number of trio tasks, pipelined on one socket.

There is no background task. Tasks hand in batches of calls and wait; the first that waits while
nobody reads the socket becomes the reader for all and passes the job on when its own batch is done.
Replies are matched by transaction id. When the connection breaks, every batch sends its unanswered
calls again on a new one (all calls here are idempotent) until its deadline: the backend's timeout
without a reply to one of its calls.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from hsfs.backends.nfs_requests import Answer, Request, check_reply
from hsfs.backends.nfs_session import Export, Session
from hsfs.backends.nfs_wire import ConnectionLost, new_socket, next_xid
from hsfs.core.errors import HsfsError, ProtocolError, TimedOut, Unavailable
from hsfs.proto import nfs3, rpc

_WINDOW = 64  # calls of one batch in flight
_RECEIVE = 256 * 1024
_BACKOFF_S, _BACKOFF_MAX_S = 0.05, 1.0
_CONNECT_TRIES = 64


class _Silent(ConnectionLost):
    """Given up because nothing at all came in a whole timeout."""


@dataclass(eq=False, slots=True)
class _Batch:
    """Calls that one task waits for. `changed` is set when the task has to look again."""

    requests: Sequence[Request]
    scope: trio.CancelScope
    timeout_s: float
    answers: list[Answer | HsfsError | None]
    unsent: list[int]
    left: int
    began: float
    lost: ConnectionLost | None = None
    flying: set[int] = field(default_factory=set)
    changed: trio.Event = field(default_factory=trio.Event)


class Link:
    """One pipelined connection to the NFS server, made when needed and again when lost."""

    def __init__(self, session: Session, limiter: trio.CapacityLimiter) -> None:
        self._session = session
        self._limiter = limiter
        self._timeout_s = session.settings.timeout_s
        self._connecting = trio.Lock()
        self._sock: socket.socket | None = None
        self._export: Export | None = None
        self._records = rpc.RecordReader()
        self._calls: dict[int, tuple[_Batch, int]] = {}
        self._outbox = bytearray()
        self._reading: trio.CancelScope | None = None
        self._waiting: dict[_Batch, None] = {}
        self._received_at = 0.0
        self._closed = False

    async def export(self) -> Export:
        """The mounted export. Raises what Session.export raises."""
        current = self._session.current
        if current is not None:
            return current
        return await trio.to_thread.run_sync(
            self._session.export, abandon_on_cancel=True, limiter=self._limiter
        )

    async def ask(self, requests: Sequence[Request]) -> list[Answer | HsfsError]:
        """Send all, pipelined, and give the answers in the same order; an RPC-level refusal is an
        error in its call's place. Raises Unavailable, TimedOut. Cancellation forgets the calls."""
        if not requests:
            return []
        now = trio.current_time()
        with trio.CancelScope(deadline=now + self._timeout_s) as scope:
            batch = _Batch(
                requests=requests,
                scope=scope,
                timeout_s=self._timeout_s,
                answers=[None] * len(requests),
                unsent=list(range(len(requests) - 1, -1, -1)),
                left=len(requests),
                began=now,
            )
            await self._finish(batch)
        if batch.left:
            if self._received_at < batch.began:
                # Nothing at all came: the next call has a better chance on a new connection.
                self._drop(_Silent(self._session.settings.url, "the server says nothing"))
            if batch.lost is not None and not isinstance(batch.lost, _Silent):
                raise Unavailable(batch.lost.what, batch.lost.why, batch.lost.next_step)
            raise TimedOut(self._session.settings.url, f"no answer for {self._timeout_s:g} s")
        return [a for a in batch.answers if a is not None]

    async def _finish(self, batch: _Batch) -> None:
        backoff_s = _BACKOFF_S
        while batch.left:
            try:
                await self._connected()
                batch.lost = None
                self._send(batch)
                await self._wait(batch)
            except ConnectionLost as error:
                batch.lost = batch.lost or error
            finally:
                self._retract(batch)
            if batch.lost is not None:
                if not self._session.known:
                    # Never reached so far: say so at once instead of waiting for a restart.
                    raise batch.lost
                await trio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    def _retract(self, batch: _Batch) -> None:
        """What is in flight is not waited for any more; unanswered calls count as unsent."""
        for xid in batch.flying:
            _, index = self._calls.pop(xid)
            batch.unsent.append(index)
        batch.flying.clear()

    def _send(self, batch: _Batch) -> None:
        while batch.unsent and len(batch.flying) < _WINDOW:
            index = batch.unsent.pop()
            request = batch.requests[index]
            xid = next_xid()
            self._calls[xid] = batch, index
            batch.flying.add(xid)
            self._outbox += rpc.call(
                xid,
                rpc.PROGRAM_NFS,
                nfs3.VERSION,
                request.procedure,
                request.credentials,
                request.arguments,
            )
        self._flush()
        if self._outbox and self._reading is not None:
            self._reading.cancel()  # the reader has to wait for room to write as well

    def _flush(self) -> None:
        if not self._outbox or self._sock is None:
            return
        try:
            sent = self._sock.send(self._outbox)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._drop(self._lost(error)) from error
        del self._outbox[:sent]

    async def _wait(self, batch: _Batch) -> None:
        """Until the batch is answered; reads for everybody when nobody else does."""
        try:
            while batch.left and batch.lost is None:
                if self._reading is None:
                    try:
                        while batch.left and batch.lost is None:
                            await self._pump()
                    finally:
                        self._reading = None
                    continue
                batch.changed = trio.Event()
                self._waiting[batch] = None
                try:
                    await batch.changed.wait()
                finally:
                    del self._waiting[batch]
        finally:
            # Also after a cancellation that crossed the word to read: somebody has to.
            if self._reading is None:
                for other in self._waiting:
                    other.changed.set()
                    break

    async def _pump(self) -> None:
        """Wait for the socket once and take in what it has."""
        sock = self._sock
        if sock is None:
            raise ConnectionLost(self._session.settings.url, "closed")
        with trio.CancelScope() as scope:
            self._reading = scope
            try:
                if self._outbox:
                    await _either(sock)
                else:
                    await trio.lowlevel.wait_readable(sock)
            except trio.ClosedResourceError as error:
                raise ConnectionLost(self._session.settings.url, "closed") from error
        if self._sock is not sock:
            return
        self._flush()
        try:
            data = sock.recv(_RECEIVE)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._drop(self._lost(error)) from error
        if not data:
            raise self._drop(
                ConnectionLost(self._session.settings.url, "the server closed the connection")
            )
        self._received_at = trio.current_time()
        try:
            records = self._records.feed(data)
            for record in records:
                self._take(record)
        except ProtocolError as error:
            raise self._drop(ConnectionLost(error.what, error.why)) from error

    def _take(self, record: bytes) -> None:
        reply = rpc.parse_reply(record)
        call = self._calls.pop(reply.xid, None)
        if call is None:
            return  # nobody waits for it any more
        batch, index = call
        batch.flying.discard(reply.xid)
        try:
            check_reply(reply, self._session.settings.url)
            status = nfs3.status_of(record, reply.body)
            batch.answers[index] = Answer(record, reply.body, status)
        except HsfsError as error:
            batch.answers[index] = error
        batch.left -= 1
        batch.scope.deadline = self._received_at + batch.timeout_s
        if batch.unsent and len(batch.flying) <= _WINDOW // 2:
            self._send(batch)
        if not batch.left:
            batch.changed.set()

    def _lost(self, error: OSError) -> ConnectionLost:
        return ConnectionLost(self._session.settings.url, error.strerror or str(error))

    def _drop(self, why: ConnectionLost) -> ConnectionLost:
        """Close the connection and tell all batches that wait on it."""
        sock, self._sock = self._sock, None
        self._outbox.clear()
        self._records = rpc.RecordReader()
        if sock is not None:
            trio.lowlevel.notify_closing(sock)
            sock.close()
        if self._reading is not None:
            self._reading.cancel()
        for batch in {batch for batch, _ in self._calls.values()}:
            batch.lost = why
            batch.changed.set()
        return why

    async def _connected(self) -> None:
        """Make the connection if there is none. Raises ConnectionLost and what export() raises."""
        if self._closed:
            raise Unavailable(self._session.settings.url, "closed")
        if self._sock is not None and self._export is self._session.current:
            return
        async with self._connecting:
            export = await self.export()
            if self._sock is not None and self._export is export:
                return
            self._drop(ConnectionLost(self._session.settings.url, "its server moved"))
            try:
                sock = await _connect(export, self._session.settings.url)
            except ConnectionLost:
                if self._session.settings.port is None:
                    self._session.forget(export)
                raise
            if self._closed:
                sock.close()
                raise Unavailable(self._session.settings.url, "closed")
            self._sock, self._export = sock, export

    def close(self) -> None:
        """Idempotent; calls in flight end with Unavailable."""
        self._closed = True
        self._drop(ConnectionLost(self._session.settings.url, "closed"))


async def _either(sock: socket.socket) -> None:
    """Until the socket can be read or written."""
    with select.epoll() as both:
        both.register(sock, select.EPOLLIN | select.EPOLLOUT)
        await trio.lowlevel.wait_readable(both.fileno())


async def _connect(export: Export, url: str) -> socket.socket:
    family, address = export.address
    for attempt in range(_CONNECT_TRIES):
        sock = new_socket(family)
        try:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
            await trio.lowlevel.wait_writable(sock)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, errno.errorcode.get(code, str(code)))
        except OSError as error:
            sock.close()
            taken = error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE)
            if taken and attempt < _CONNECT_TRIES - 1:
                continue
            raise ConnectionLost(url, error.strerror or str(error)) from error
        except BaseException:
            sock.close()
            raise
        return sock
    raise ConnectionLost(url, "no local port is left")
