"""The frames side of the metadata server: connections on asyncio (uvloop), HELLO, dispatch.

A connection that has not said a valid HELLO within ten seconds is closed; a unix peer must be the
server's user or root, a TCP peer must show the token. Requests run concurrently, each in a task of
its own; a peer that has too many in flight, or does not read its replies, is not read from. What
breaks the protocol ends its connection, never the server.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, cast

import structlog

from hsfs.core.errors import (
    HsfsError,
    NotFound,
    NotSupported,
    ProtocolError,
    Trimmed,
    Unauthorised,
    Unavailable,
    Unsupported,
)
from hsfs.core.ports import Listing
from hsfs.mdserver.sessions import Journal, Session, Sessions
from hsfs.proto import messages as m
from hsfs.proto.frames import (
    PROTOCOL_VERSION,
    Request,
    Splitter,
    decode_body,
    decode_request,
    encode_error,
    encode_reply,
)
from hsfs.rpc.address import peer_of

log = structlog.get_logger("hsfs.mds")

HELLO_TIMEOUT_S = 10.0
IN_FLIGHT_MAX = 1024
KINDS = ("mount", "mover", "tool")

# The server passes the session and the decoded arguments.
Handler = Callable[[Session, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Identity:
    """What the server says of itself. `definition` is read anew for every HELLO."""

    volume: str
    store: bytes
    token: str
    lease_s: float
    definition: Callable[[], bytes]


class Server:
    """Listens and dispatches. `left` is called when a session's connection ends."""

    def __init__(
        self,
        identity: Identity,
        journal: Journal,
        handlers: Mapping[int, Handler],
        sessions: Sessions,
        *,
        left: Callable[[Session], None],
    ) -> None:
        self.identity = identity
        self.journal = journal
        self.handlers = handlers
        self.sessions = sessions
        self.left = left
        self.requests = 0
        self._listeners: list[asyncio.Server] = []
        self._connections: set[Connection] = set()

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections on a bound socket (unix or TCP)."""
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            server = await loop.create_unix_server(
                lambda: Connection(self, local=True), sock=sock, backlog=1024
            )
        else:
            server = await loop.create_server(
                lambda: Connection(self, local=False), sock=sock, backlog=1024
            )
        self._listeners.append(server)

    def stop_listening(self) -> None:
        """Refuse new connections. Idempotent."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def aclose(self) -> None:
        """End everything."""
        self.stop_listening()
        await self.sessions.aclose()
        tasks: list[asyncio.Task[None]] = []
        for connection in list(self._connections):
            tasks += connection.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    def opened(self, connection: Connection) -> None:
        """A connection was made."""
        self._connections.add(connection)

    def closed(self, connection: Connection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)


class Connection(asyncio.Protocol):
    """One peer."""

    def __init__(self, server: Server, *, local: bool) -> None:
        self._server = server
        self._local = local
        self._pid = 0  # of a local peer
        self._splitter = Splitter()
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        self._greeting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._full = False  # the transport's buffer
        self._paused = False  # we don't read
        self._drained = asyncio.Event()
        self._drained.set()
        self._timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Check who it is."""
        # No subclass of asyncio.Transport under uvloop, though it is one in all but name.
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        self._server.opened(self)
        transport.set_write_buffer_limits(high=1024 * 1024)
        self._timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._impatient)
        if self._local:
            self._pid, uid = peer_of(transport.get_extra_info("socket"))
            if uid not in (0, os.geteuid()):
                log.warning("refused a connection of another user", uid=uid)
                transport.abort()

    def data_received(self, data: bytes) -> None:
        """Dispatch whole requests."""
        try:
            for body in self._splitter.feed(data):
                self._request(decode_request(body))
        except ProtocolError as error:
            log.warning("ended a connection that breaks the protocol", why=str(error))
            self._abort()

    def pause_writing(self) -> None:
        """The peer does not read: don't make it more replies."""
        self._full = True
        self._drained.clear()
        self._flow()

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._full = False
        self._drained.set()
        self._flow()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop what the peer waited for; work with a request id goes on."""
        if self._timer is not None:
            self._timer.cancel()
        self._server.closed(self)
        self._drained.set()
        for task in self._tasks:
            task.cancel()
        if self._session is not None:
            self._server.sessions.remove(self._session)
            self._server.left(self._session)

    # --- ours --------------------------------------------------------------------------------

    def abort(self) -> list[asyncio.Task[None]]:
        """End the connection; the tasks that will end with it."""
        self._abort()
        return list(self._tasks)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _impatient(self) -> None:
        if self._session is None:
            self._abort()

    def _flow(self) -> None:
        assert self._transport is not None
        pause = self._full or len(self._tasks) >= IN_FLIGHT_MAX
        if pause != self._paused and not self._transport.is_closing():
            self._paused = pause
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _send(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    async def _wait_drained(self) -> None:
        await self._drained.wait()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _request(self, request: Request) -> None:
        session = self._session
        if session is None:
            if self._greeting or request.op != m.Op.HELLO:
                raise ProtocolError("request", f"op {request.op} before HELLO was answered")
            self._greeting = True
            self._start(self._greet(request))
            return
        self._server.requests += 1
        session.heard_s = time.monotonic()
        self._start(self._answer(session, request))
        if len(self._tasks) >= IN_FLIGHT_MAX:
            self._flow()

    async def _answer(self, session: Session, request: Request) -> None:
        server = self._server
        try:
            handler = server.handlers.get(request.op)
            if handler is None:
                raise NotSupported("metadata server", f"no operation {request.op}")
            args = decode_body(m.ARGS_DECODERS[request.op], request.args, "arguments")
            if request.request_id:
                result = await server.sessions.once(
                    session.client, request.request_id, lambda: _call(handler, session, args)
                )
            else:
                result = await handler(session, args)
            # No await between the handler's last step and this line: the answer belongs to `seq`.
            seq = server.journal.seq
            frame = _reply(request.id, server.journal.epoch, seq, result)
        except HsfsError as error:
            frame = encode_error(request.id, error, server.journal.seq)
        except Exception:
            log.exception("operation failed", op=request.op)
            broken = Unavailable("metadata server", "internal error", "see its log")
            frame = encode_error(request.id, broken, server.journal.seq)
        self._send(frame)
        if self._paused:
            asyncio.get_running_loop().call_soon(self._flow)

    async def _greet(self, request: Request) -> None:
        try:
            hello: m.Hello = decode_body(m.ARGS_DECODERS[m.Op.HELLO], request.args, "HELLO")
            welcome = await self._welcome(hello)
        except HsfsError as error:
            log.warning("refused a session", why=str(error))
            self._send(encode_error(request.id, error))
            if self._transport is not None:
                self._transport.close()
            return
        assert self._transport is not None
        session = Session(
            hello.client,
            hello.kind,
            self._pid,
            self._send,
            self._wait_drained,
            self._transport.abort,
        )
        self._session = session
        self._server.sessions.add(session)
        self._send(encode_reply(request.id, welcome.epoch, welcome.seq, welcome))
        if hello.kind == "mount":
            after = welcome.seq if welcome.forget or not hello.seq else hello.seq
            self._start(session.push(self._server.journal, after))

    async def _welcome(self, hello: m.Hello) -> m.Welcome:
        me, journal = self._server.identity, self._server.journal
        if not hello.version_min <= PROTOCOL_VERSION <= hello.version_max:
            raise Unsupported(
                "protocol",
                f"the server speaks version {PROTOCOL_VERSION}, the client "
                f"{hello.version_min} to {hello.version_max}",
                "upgrade the older of the two",
            )
        if hello.kind not in KINDS or len(hello.client) != 16:
            raise ProtocolError("HELLO", "unknown kind of client")
        if not self._local and not hmac.compare_digest(hello.token.encode(), me.token.encode()):
            raise Unauthorised(
                "metadata server", "wrong token", "set HSFS_TOKEN_FILE to a copy of its token"
            )
        if hello.volume and hello.volume != me.volume:
            raise NotFound(f"volume {hello.volume}", f'this server serves "{me.volume}"')
        forget = False
        if hello.seq:
            forget = hello.store != me.store or not await _covers(journal, hello.seq)
        return m.Welcome(
            PROTOCOL_VERSION,
            journal.epoch,
            journal.seq,
            me.lease_s,
            me.volume,
            me.store,
            forget,
            os.getpid(),
            me.definition(),
        )


def _reply(ident: int, epoch: int, seq: int, result: object) -> bytes:
    """A reply frame; a page of very long keys is cut so that it fits."""
    while True:
        try:
            return encode_reply(ident, epoch, seq, result)
        except ProtocolError:
            if not isinstance(result, Listing) or len(result.entries) < 2:
                raise
            half = result.entries[: len(result.entries) // 2]
            result = Listing(half, True, result.change)


async def _call(handler: Handler, session: Session, args: object) -> object:
    return await handler(session, args)


async def _covers(journal: Journal, seq: int) -> bool:
    """Whether the journal still tells all that happened behind `seq`."""
    if seq > journal.seq:
        return False  # of a store that was restored from a backup
    if seq == journal.seq:
        return True
    watch = journal.watch(seq)
    try:
        async with asyncio.timeout(5):
            await anext(watch)
    except Trimmed:
        return False
    except (TimeoutError, StopAsyncIteration):
        return True
    finally:
        aclose = getattr(watch, "aclose", None)
        if aclose is not None:
            await aclose()
    return True
