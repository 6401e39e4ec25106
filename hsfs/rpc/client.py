"""The trio client of the metadata server: `core.ports.Mds`, and the calls of movers and tools.

One stream, many calls in flight. A call appends its frame and parks its task; the reader decodes
straight into the result type and reschedules the task. There is no task, timer or lock per call:
deadlines are looked at twice a second.

Connection loss: the client reconnects by itself, tells the server where it stood, sends again what
was in flight (every operation is idempotent) and goes on. A call fails when the server has been
silent for `timeout_s` since it was made. A server that answers pings bounds its calls itself, by
the timeouts of the backends; four times `timeout_s` is the end in any case.

Coherence: a promise lasts `lease_s` from the moment when the last answered request was *sent*. What
the server can't replay after a loss, and a lease that ended, arrive as Invalidation(ino=0). A reply
that was read before a push which already has been applied must not be cached: its Nodes get
`ttl_s` 0, and a NotFound is asked again.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import msgspec
import outcome
import structlog
import trio

from hsfs.core.errors import (
    HsfsError,
    NotFound,
    ProtocolError,
    TimedOut,
    Unavailable,
)
from hsfs.core.jobs import Job, Outcome
from hsfs.core.ports import Device, Invalidation, Listing
from hsfs.core.types import (
    DeviceId,
    DirectoryPage,
    Entry,
    Info,
    Ino,
    Name,
    Node,
    Space,
    Version,
    Wire,
)
from hsfs.proto import messages as m
from hsfs.proto.frames import (
    PROTOCOL_VERSION,
    Answer,
    Splitter,
    decode_answer,
    decode_body,
    decode_error,
    encode_request,
)
from hsfs.rpc.address import Address, check_peer, open_socket, socket_name, unreachable
from hsfs.rpc.greeting import read_welcome

log = structlog.get_logger("hsfs.rpc")

T = TypeVar("T")

PING_S = 10.0
HELLO_TIMEOUT_S = 10.0
_RECEIVE = 256 * 1024
_TOUCHED_MAX = 32 * 1024
_UPCALLS_MAX = 64 * 1024
_INLINE_CALLS = 2  # up to here a frame is sent at once; beyond, frames of one tick go together
_LONG_S = 24 * 3600.0


class Pending:
    """An answer to come: of a request whose sender does something else meanwhile."""

    def __init__(self) -> None:
        self._done = trio.Event()
        self._result: object = None

    async def wait(self) -> None:
        """Until the server has answered. Raises what it answered with."""
        await self._done.wait()
        if isinstance(self._result, HsfsError):
            raise self._result

    def settle(self, result: object) -> None:
        """The answer is there."""
        self._result = result
        self._done.set()


class _Call:
    __slots__ = ("cap_s", "decoder", "frame", "sent_s", "task")

    def __init__(
        self,
        task: trio.lowlevel.Task | Pending,
        frame: bytes,
        decoder: msgspec.msgpack.Decoder[Any],
        sent_s: float,
        cap_s: float,
    ) -> None:
        self.task = task
        self.frame = frame
        self.decoder = decoder
        self.sent_s = sent_s
        self.cap_s = cap_s


class MdsClient:
    """A session with a metadata server; made by `connect`."""

    def __init__(
        self,
        address: Address,
        *,
        kind: str,
        token: str,
        timeout_s: float,
        revive: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._address = address
        self._kind = kind
        self._token = token
        self._timeout_s = timeout_s
        self._revive = revive
        self._client = os.urandom(16)
        self._welcome: m.Welcome | None = None
        self._sock: socket.socket | None = None
        self._splitter = Splitter()
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        self._out = bytearray()
        self._writing = False
        self._writer: trio.lowlevel.Task | None = None
        self._heard_s = 0.0
        self._lease_until_s = 0.0
        self._lease_s = 30.0
        self._lease_lost = False
        self._applied_seq = 0
        self._floor_seq = 0  # below it the ring knows nothing: replies count as raced
        self._touched: dict[int, int] = {}
        self._upcalls: list[Invalidation] = []
        self._upcalls_ready = trio.Event()
        self._lost = trio.Event()

    # --- state -------------------------------------------------------------------------------

    @property
    def welcome(self) -> m.Welcome:
        """What the server said of itself at the last HELLO."""
        assert self._welcome is not None
        return self._welcome

    @property
    def connected(self) -> bool:
        """Whether a connection stands now."""
        return self._sock is not None

    @property
    def applied_seq(self) -> int:
        """Journal position up to which pushes have been received."""
        return self._applied_seq

    def lease_left_s(self) -> float:
        """Seconds for which what was cached may still be used; 0 = the lease is over."""
        return max(0.0, self._lease_until_s - time.monotonic())

    # --- core.ports.Mds ----------------------------------------------------------------------

    async def lookup(self, parent: Ino, name: Name) -> Node:
        """Raises NotFound, NotADirectory."""
        args = m.LookupArgs(parent, name)
        while True:
            result, seq = await self._raw(m.Op.LOOKUP, args)
            if isinstance(result, Node):
                if seq < self._applied_seq:
                    return self._aged(result, seq, parent)
                return result
            if (
                isinstance(result, NotFound)
                and seq < self._applied_seq
                and self._raced(parent, seq)
            ):
                continue  # the name may have come meanwhile, and absence is cached, too
            raise result

    async def getattr(self, ino: Ino) -> Node:
        """Raises NotFound."""
        node, seq = await self._call(m.Op.GETATTR, m.InodeArgs(ino), Node)
        return self._aged(node, seq) if seq < self._applied_seq else node

    async def list(self, ino: Ino, after: Name, limit: int) -> Listing:
        """Entries in byte order behind `after`, at most 256. Raises NotFound, NotADirectory."""
        listing, seq = await self._call(m.Op.LIST, m.ListArgs(ino, after, limit), Listing)
        if seq < self._applied_seq:
            entries = tuple(Entry(e.name, self._aged(e.node, seq, ino)) for e in listing.entries)
            return Listing(entries, listing.more, listing.change)
        return listing

    async def revalidate(self, ino: Ino, version: Version) -> Node:
        """Ask the source now: a read met another version than `version`. Raises NotFound."""
        node, seq = await self._call(m.Op.REVALIDATE, m.RevalidateArgs(ino, version), Node)
        return self._aged(node, seq) if seq < self._applied_seq else node

    async def refresh(self, ino: Ino, recursive: bool) -> int:
        """Ask the source about everything at or below; returns the number of entries seen."""
        args = m.RefreshArgs(ino, recursive)
        return (await self._call(m.Op.REFRESH, args, int, cap_s=_LONG_S, once=True))[0]

    async def devices(self) -> Sequence[Device]:
        """All backends with their state."""
        devices: tuple[Device, ...] = (await self._call(m.Op.DEVICES, m.Nothing(), tuple))[0]
        return devices

    async def space(self) -> Space:
        """statfs."""
        return (await self._call(m.Op.SPACE, m.Nothing(), Space))[0]

    async def report(self, device: DeviceId, state: str, why: str) -> None:
        """This node's word on a backend's health."""
        await self._raised(m.Op.REPORT, m.ReportArgs(device, state, why))

    async def invalidations(self) -> AsyncIterator[Sequence[Invalidation]]:
        """Up-calls in journal order, one consumer; Invalidation(ino=0) = forget everything."""
        while True:
            await self._upcalls_ready.wait()
            batch, self._upcalls = self._upcalls, []
            self._upcalls_ready = trio.Event()
            yield batch

    # --- tools and movers --------------------------------------------------------------------

    async def walk(self, path: bytes) -> Node:
        """The node at an absolute path of the volume. Raises NotFound, NotADirectory."""
        return (await self._call(m.Op.WALK, m.WalkArgs(path), Node))[0]

    async def info(self, ino: Ino) -> Info:
        """What the server knows of an inode. Raises NotFound."""
        return (await self._call(m.Op.INFO, m.InodeArgs(ino), Info))[0]

    async def status(self) -> m.ServerStatus:
        """The server about itself."""
        return (await self._call(m.Op.STATUS, m.Nothing(), m.ServerStatus))[0]

    async def define(self, volume: bytes) -> int:
        """Tell the server a volume definition (`core.config.encode_volume`)."""
        return (await self._call(m.Op.DEFINE, m.DefineArgs(volume), int, once=True))[0]

    async def assimilate(self, backends: tuple[str, ...] = (), *, restart: bool = False) -> None:
        """Start scans; `scans` tells how they go. Raises NotFound (no such backend)."""
        await self._raised(m.Op.ASSIMILATE, m.AssimilateArgs(backends, restart), once=True)

    async def scans(self) -> tuple[m.ScanStatus, ...]:
        """Where the scans stand."""
        scans: tuple[m.ScanStatus, ...] = (await self._call(m.Op.SCANS, m.Nothing(), tuple))[0]
        return scans

    async def take(self, limit: int, wait_s: float) -> tuple[Job, ...]:
        """Jobs for this mover; waits up to `wait_s` seconds for the first."""
        jobs: tuple[Job, ...] = (await self._call(m.Op.TAKE, m.TakeArgs(limit, wait_s), tuple))[0]
        return jobs

    def send_pages(self, job: Job, pages: tuple[DirectoryPage, ...], cursor: bytes) -> Pending:
        """Deliver results, in the order of the calls; the answer comes when the server has taken
        them in (or LeaseLost). Raises ProtocolError: too much for one frame."""
        pending = Pending()
        args = m.PagesArgs(job.id, job.token, pages, cursor)
        self._begin(pending, m.Op.PAGES, args, _LONG_S, False)
        return pending

    async def finish(self, job: Job, result: Outcome) -> None:
        """End a job. Raises LeaseLost (somebody else has it)."""
        await self._raised(m.Op.FINISH, m.FinishArgs(job.id, job.token, result))

    # --- calls -------------------------------------------------------------------------------

    async def _raw(
        self, op: m.Op, args: Wire, cap_s: float | None = None, once: bool = False
    ) -> tuple[Any, int]:
        """(result or HsfsError, journal position). Cancelled: the answer is dropped."""
        task = trio.lowlevel.current_task()
        ident = self._begin(task, op, args, cap_s or 4 * self._timeout_s, once)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._calls.pop(ident, None)
            return trio.lowlevel.Abort.SUCCEEDED

        answer: tuple[Any, int] = await trio.lowlevel.wait_task_rescheduled(abort)
        return answer

    async def _call(
        self,
        op: m.Op,
        args: Wire,
        kind: type[T],
        *,
        cap_s: float | None = None,
        once: bool = False,
    ) -> tuple[T, int]:
        result, seq = await self._raw(op, args, cap_s, once)
        if isinstance(result, HsfsError):
            raise result
        assert isinstance(result, kind)
        return result, seq

    async def _raised(self, op: m.Op, args: Wire, once: bool = False) -> None:
        result, _ = await self._raw(op, args, None, once)
        if isinstance(result, HsfsError):
            raise result

    def _begin(
        self, task: trio.lowlevel.Task | Pending, op: m.Op, args: Wire, cap_s: float, once: bool
    ) -> int:
        self._last_id = ident = self._last_id + 1
        frame = encode_request(ident, op, os.urandom(16) if once else None, args)
        now = time.monotonic()
        self._calls[ident] = _Call(task, frame, m.RESULT_DECODERS[op], now, now + cap_s)
        self._post(frame)
        return ident

    def _post(self, frame: bytes) -> None:
        sock = self._sock
        if sock is None:
            return  # goes out with the next connection
        if not self._writing and not self._out and len(self._calls) <= _INLINE_CALLS:
            try:
                sent = sock.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the reader meets the same error and reconnects
            if sent == len(frame):
                return
            frame = frame[sent:]
        self._out += frame
        if self._writer is not None:
            trio.lowlevel.reschedule(self._writer)
            self._writer = None

    def _settle(self, call: _Call, result: object, seq: int) -> None:
        if isinstance(call.task, Pending):
            call.task.settle(result)
        else:
            trio.lowlevel.reschedule(call.task, outcome.Value((result, seq)))

    # --- coherence ---------------------------------------------------------------------------

    def _raced(self, ino: int, seq: int) -> bool:
        return seq < self._floor_seq or self._touched.get(ino, 0) > seq

    def _aged(self, node: Node, seq: int, parent: int = 0) -> Node:
        if self._raced(node.attributes.ino, seq) or (parent and self._raced(parent, seq)):
            return msgspec.structs.replace(node, ttl_s=0.0)
        return node

    def _forget(self, seq: int) -> None:
        self._applied_seq = seq
        self._floor_seq = seq
        self._touched.clear()
        self._upcall([Invalidation(0, b"", seq)])

    def _upcall(self, records: Sequence[Invalidation]) -> None:
        if len(self._upcalls) + len(records) > _UPCALLS_MAX:
            self._upcalls = [Invalidation(0, b"", self._applied_seq)]
        else:
            self._upcalls.extend(records)
        self._upcalls_ready.set()

    def _pushed(self, answer: Answer) -> None:
        # In a push the four fields are 0, epoch, seq_from, seq_to; see the table in proto.frames.
        first, last = answer.second, answer.third
        if not isinstance(first, int) or not isinstance(last, int):
            raise ProtocolError("push", "no journal positions")
        records = decode_body(m.RECORDS_DECODER, answer.body, "push")
        if last < self._applied_seq:
            return  # (one journal record may come in several frames: the same position again)
        if records is None or first > self._applied_seq + 1:
            self._forget(last)
            return
        self._applied_seq = last
        touched = self._touched
        if len(touched) + len(records) > _TOUCHED_MAX:
            touched.clear()
            self._floor_seq = last
        for record in records:
            touched[record.ino] = record.seq or last
        if records:
            self._upcall(records)

    # --- connection --------------------------------------------------------------------------

    async def _dial(self) -> None:
        """One connection attempt with HELLO. Raises leaves of HsfsError."""
        sent_s = time.monotonic()
        splitter = Splitter()
        sock, welcome, early = await _greet(self._address, self._hello(), splitter)
        before = self._welcome
        self._welcome = welcome
        self._splitter = splitter
        self._out.clear()
        self._writing = False
        self._lease_s = welcome.lease_s
        self._heard_s = time.monotonic()
        self._lease_until_s = sent_s + welcome.lease_s
        if before is None:
            self._applied_seq = self._floor_seq = welcome.seq
        elif welcome.forget or welcome.store != before.store:
            self._forget(welcome.seq)
        self._lease_lost = False
        self._sock = sock
        for call in self._calls.values():
            self._out += call.frame
        self._received(early)

    async def _first_dial(self) -> None:
        """As `_dial`; a server that was about to leave is revived once."""
        try:
            await self._dial()
        except Unavailable:
            if self._revive is None:
                raise
            await self._revive()
            await self._dial()

    def _hello(self) -> m.Hello:
        known = self._welcome
        return m.Hello(
            PROTOCOL_VERSION,
            PROTOCOL_VERSION,
            self._kind,
            self._client,
            self._token,
            self._address.volume,
            known.epoch if known else 0,
            self._applied_seq if known else 0,
            known.store if known else b"",
        )

    async def _keep(self) -> None:
        """Serve the connection, and make another one when it is lost; for ever."""
        delay_s = 0.02
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            while True:
                if self._sock is not None:
                    began_s = time.monotonic()
                    await self._serve()
                    if time.monotonic() - began_s > 1.0:
                        delay_s = 0.02
                try:
                    await self._dial()
                    log.info("reconnected", address=str(self._address))
                    continue
                except HsfsError as error:
                    log.debug("no connection", address=str(self._address), why=str(error))
                    if self._revive is not None and isinstance(error, Unavailable):
                        await self._try_revive(self._revive)
                await trio.sleep(delay_s * random.uniform(0.7, 1.3))
                delay_s = min(2.0, delay_s * 2)

    async def _try_revive(self, revive: Callable[[], Awaitable[None]]) -> None:
        try:
            await revive()
        except (HsfsError, OSError) as error:
            log.warning("the metadata server can't be started again", why=str(error))

    async def _serve(self) -> None:
        sock = self._sock
        assert sock is not None
        why = "closed by the server"
        self._lost = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, sock)
                nursery.start_soon(_cancel_when, self._lost, nursery.cancel_scope)
                try:
                    await self._read(sock)
                except (OSError, ProtocolError) as error:
                    why = str(error)
                nursery.cancel_scope.cancel()
        finally:
            self._sock = None
            self._writer = None
            sock.close()
        log.warning("connection to the metadata server lost", why=why)

    async def _read(self, sock: socket.socket) -> None:
        while True:
            await trio.lowlevel.wait_readable(sock)
            try:
                data = sock.recv(_RECEIVE)
            except BlockingIOError:
                continue
            if not data:
                return
            self._heard_s = time.monotonic()
            self._received(self._splitter.feed(data))

    def _received(self, bodies: Sequence[bytes]) -> None:
        calls = self._calls
        for body in bodies:
            answer = decode_answer(body)
            if answer.id == 0:
                self._pushed(answer)
                continue
            call = calls.get(answer.id)
            if call is None:
                continue  # cancelled or given up
            if answer.status:
                result, seq = decode_error(answer)
            else:
                result = decode_body(call.decoder, answer.body, "reply")
                if not isinstance(answer.third, int):
                    raise ProtocolError("reply", "no journal position")
                seq = answer.third
            del calls[answer.id]
            if call.sent_s + self._lease_s > self._lease_until_s:
                self._lease_until_s = call.sent_s + self._lease_s
            self._settle(call, result, seq)

    async def _write(self, sock: socket.socket) -> None:
        try:
            while True:
                if not self._out:
                    self._writing = False
                    self._writer = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(self._unpark)
                    continue
                self._writing = True
                data = memoryview(bytes(self._out))
                self._out.clear()
                while data:
                    try:
                        data = data[sock.send(data) :]
                    except BlockingIOError:
                        await trio.lowlevel.wait_writable(sock)
        except OSError:
            self._lost.set()

    def _unpark(self, _: object) -> trio.lowlevel.Abort:
        self._writer = None
        return trio.lowlevel.Abort.SUCCEEDED

    async def _watch(self) -> None:
        """Deadlines, pings and the lease."""
        pinged_s = 0.0
        while True:
            await trio.sleep(0.5)
            now = time.monotonic()
            self._expire(now)
            if self._lease_until_s < now and not self._lease_lost:
                self._lease_lost = True
                log.warning("lease lost: everything cached is asked again")
                self._forget(self._applied_seq)
            if self._sock is None:
                continue
            renewed_s = self._lease_until_s - self._lease_s
            if now - max(renewed_s, pinged_s) >= min(PING_S, self._lease_s / 3):
                pinged_s = now
                self._begin(Pending(), m.Op.PING, m.Nothing(), self._timeout_s, False)
            if self._calls and now - self._heard_s > max(PING_S, self._lease_s / 2):
                oldest = min(call.sent_s for call in self._calls.values())
                if now - max(oldest, self._heard_s) > max(PING_S, self._lease_s / 2):
                    self._lost.set()  # alive but silent: another connection may do better

    def _expire(self, now: float) -> None:
        for ident, call in list(self._calls.items()):
            silent_s = now - max(call.sent_s, self._heard_s if self._sock else 0.0)
            if silent_s > self._timeout_s or now > call.cap_s:
                del self._calls[ident]
                why = f"no answer for {now - call.sent_s:.0f} s"
                kind = TimedOut if self._sock else Unavailable
                self._settle(call, kind("metadata server", why), 0)


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def _connect_socket(address: Address) -> socket.socket:
    sock, target = open_socket(address)
    try:
        sock.setblocking(False)
        if address.path is not None:
            with socket_name(address.path) as name:
                sock.connect(name)
        else:
            try:
                sock.connect(target)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(sock)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code)) from None
        check_peer(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _greet(
    address: Address, hello: m.Hello, splitter: Splitter
) -> tuple[socket.socket, m.Welcome, list[bytes]]:
    """A connection that the server has accepted, and the frames that came behind its welcome."""
    sock: socket.socket | None = None
    try:
        with trio.fail_after(HELLO_TIMEOUT_S):
            sock = await _connect_socket(address)
            data = memoryview(encode_request(1, m.Op.HELLO, None, hello))
            while data:
                await trio.lowlevel.wait_writable(sock)
                data = data[sock.send(data) :]
            bodies: list[bytes] = []
            while not bodies:
                await trio.lowlevel.wait_readable(sock)
                try:
                    piece = sock.recv(_RECEIVE)
                except BlockingIOError:
                    continue
                if not piece:
                    raise Unavailable(str(address), "the server closed the connection")
                bodies = splitter.feed(piece)
        welcome = read_welcome(bodies[0])
        connected, sock = sock, None
        return connected, welcome, bodies[1:]
    except trio.TooSlowError:
        raise TimedOut(str(address), "the server does not answer") from None
    except OSError as error:
        raise unreachable(address, error) from error
    finally:
        if sock is not None:
            sock.close()


@contextmanager
def _single_errors() -> Iterator[None]:
    """An exception of the body leaves as itself, not as a group of one."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if error is group:
            raise
        raise error from error.__cause__


@asynccontextmanager
async def connect(
    address: Address,
    *,
    kind: str = "mount",
    token: str = "",
    timeout_s: float = 30.0,
    revive: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[MdsClient]:
    """A session with the server at `address`, kept alive until the context ends.

    `revive` is called (on the loop) when nothing listens there any more, and may start a server.
    Raises Unavailable, TimedOut, Unauthorised, NotFound (another volume), Unsupported.
    """
    client = MdsClient(address, kind=kind, token=token, timeout_s=timeout_s, revive=revive)
    await client._first_dial()
    with _single_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client._keep)
            try:
                yield client
            finally:
                nursery.cancel_scope.cancel()
