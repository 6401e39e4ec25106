"""A lean blocking HTTP/1.1 client: the kernel moves the body, Python only reads the head.

One request is one `send`; the head of the answer is one `recv` into a buffer of the link; the body
is received straight into the caller's memory with MSG_WAITALL, so that a MiB is one Python call
with the GIL released. No progress within the time limit is noticed by SO_RCVTIMEO (a TLS link uses
Python's own timeout instead: OpenSSL sees EAGAIN as "want read" and Python would call again for
ever). A link goes back to the pool only when its answer was read to the end; in any doubt it is
closed. Only idempotent requests without a body are sent, so that a keep-alive link that the server
had closed meanwhile costs one immediate second try on a fresh one.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Self

from hsfs.core.errors import Interrupted, ProtocolError, TimedOut, Unavailable
from hsfs.core.ports import Interrupt

_HEAD_BUFFER: Final = 8 * 1024
_HEAD_MAX: Final = 64 * 1024
_IDLE_MAX_S: Final = 20.0  # common servers close at 20 to 90 s; an older link is likelier dead
_RECEIVE_BUFFER: Final = 4 << 20
_DRAIN_MAX: Final = 64 * 1024
_LOW_WATER: Final = 256 * 1024  # wake the reader of a big body once per so many bytes
_LITTLE: Final = 1024  # fewer bytes than this per time limit is no progress


class _Link:
    """One connection. `fresh` until its first answer."""

    __slots__ = ("fresh", "head", "idle_since", "limit_s", "low_water", "sock", "tls")

    def __init__(self, sock: socket.socket, limit_s: float, *, tls: bool) -> None:
        self.sock = sock
        self.tls = tls
        self.limit_s = limit_s
        self.fresh = True
        self.low_water = 1
        self.idle_since = 0.0
        self.head = memoryview(bytearray(_HEAD_BUFFER))

    def limit(self, limit_s: float) -> None:
        """Longest wait for progress of one send or receive."""
        self.limit_s = limit_s
        if self.tls:
            self.sock.settimeout(limit_s)
            return
        whole = int(limit_s)
        value = struct.pack("@ll", whole, int((limit_s - whole) * 1e6) or (0 if whole else 1000))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def wake_at(self, size: int) -> None:
        """Leave the reader asleep until `size` bytes have come; must not exceed what is to come."""
        self.low_water = size
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def shut(self) -> None:
        """End whatever waits on the link, from any thread; the owner closes it."""
        # Not connected any more: nothing waits. And not SSLSocket.shutdown: that one also drops the
        # TLS state under the reader's feet.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class Reply:
    """An answer whose body is still on the wire. Always `close` it."""

    __slots__ = (
        "_chunk",
        "_chunked",
        "_interrupt",
        "_left",
        "_link",
        "_rest",
        "_wire",
        "fields",
        "length",
        "status",
    )

    def __init__(
        self,
        wire: Wire,
        link: _Link,
        interrupt: Interrupt,
        status: int,
        fields: dict[bytes, bytes],
        rest: memoryview,
        *,
        bodiless: bool,
    ) -> None:
        self._wire = wire
        self._link: _Link | None = link
        self._interrupt = interrupt
        self.status = status
        self.fields = fields  # names in lower case
        self._rest = rest
        self._chunked = False
        self._chunk = 0
        self.length: int | None = None  # bytes of the body, where the head says so
        self._left = -1  # bytes still to come; -1 = until the end
        if bodiless:
            self._left = 0
        elif b"chunked" in fields.get(b"transfer-encoding", b"").lower():
            self._chunked = True
        elif (length := fields.get(b"content-length")) is not None:
            if not length.isdigit():
                raise ProtocolError(wire.name, "Content-Length is no number")
            self.length = self._left = int(length)

    def read_into(self, view: memoryview) -> int:
        """Fill `view` from the body; fewer bytes only at its end or where the peer cut it.

        `complete` tells which. Raises TimedOut, Interrupted, Unavailable, ProtocolError.
        """
        if self._left >= 0:
            want = min(len(view), self._left)
            got = self._raw(view, want)
            self._left -= got
            return got
        if not self._chunked:
            return self._raw(view, len(view))
        done = 0
        while done < len(view):
            if self._chunk == 0 and not self._next_chunk():
                break
            want = min(len(view) - done, self._chunk)
            got = self._raw(view[done:], want)
            done += got
            self._chunk -= got
            if got < want:
                return done
        return done

    @property
    def complete(self) -> bool:
        """The body was read to its end."""
        return self._left == 0

    def read_all(self, limit: int) -> bytes:
        """The whole body. Raises ProtocolError when it exceeds `limit` bytes, Unavailable when the
        peer cuts it."""
        if self._left >= 0:
            if self._left > limit:
                raise ProtocolError(self._wire.name, f"answer of {self._left} bytes")
            body = bytearray(self._left)
            got = self.read_into(memoryview(body))
            if not self.complete:
                raise Unavailable(self._wire.name, f"connection cut after {got} bytes")
            return bytes(body)
        body = bytearray()
        piece = bytearray(256 * 1024)
        while True:
            got = self.read_into(memoryview(piece))
            body += memoryview(piece)[:got]
            if len(body) > limit:
                raise ProtocolError(self._wire.name, f"answer of more than {limit} bytes")
            if got < len(piece):
                if self._chunked and not self.complete:
                    raise Unavailable(self._wire.name, f"connection cut after {len(body)} bytes")
                return bytes(body)

    def close(self) -> None:
        """Hand the link back to the pool if it is clean, else close it. Idempotent."""
        link, self._link = self._link, None
        if link is None:
            return
        self._interrupt.detach()
        if (
            self._left == 0
            and not self._rest
            and not self._interrupt.interrupted
            and self.fields.get(b"connection", b"").lower() != b"close"
        ):
            self._wire.keep(link)
        else:
            self._wire.drop(link)

    def suspend(self) -> None:
        """Leave the rest of the body for later: the interrupt is free for other uses."""
        self._interrupt.detach()

    def resume(self, interrupt: Interrupt) -> None:
        """Go on after `suspend`, perhaps in another thread and for another caller."""
        self._interrupt = interrupt
        if self._link is not None:
            interrupt.attach(self._link.shut)

    def drain(self) -> None:
        """Read a small unread body away, so that the link can be used again; then `close`."""
        if 0 < self._left <= _DRAIN_MAX:
            self.read_into(memoryview(bytearray(self._left)))
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _raw(self, view: memoryview, want: int) -> int:
        """Receive `want` bytes; fewer only when the peer has closed."""
        got = len(self._rest)
        if got:
            got = min(got, want)
            view[:got] = self._rest[:got]
            self._rest = self._rest[got:]
        link = self._link
        if got == want or link is None:
            return got
        receive = link.sock.recv_into
        flags = 0 if link.tls else socket.MSG_WAITALL
        if not link.tls and want - got >= 4 * _LOW_WATER:
            # The last piece is received with the mark at 1: fewer bytes than the mark may be left.
            link.wake_at(_LOW_WATER)
            got += self._pump(receive, flags, view[got : want - _LOW_WATER])
            link.wake_at(1)
            if got < want - _LOW_WATER:
                return got
        return got + self._pump(receive, flags, view[got:want])

    def _pump(self, receive: Callable[..., int], flags: int, view: memoryview) -> int:
        got, size = 0, len(view)
        start, before = time.monotonic(), 0
        while got < size:
            try:
                n = receive(view[got:] if got else view, size - got, flags)
            except (BlockingIOError, TimeoutError):
                raise TimedOut(self._wire.name, self._wire.no_progress(self._link)) from None
            except OSError as error:
                self._check()
                if got:  # what came before the reset is good; the caller sees that it is not all
                    return got
                raise Unavailable(self._wire.name, _reason(error)) from error
            if n == 0:
                self._check()
                return got
            got += n
            # MSG_WAITALL comes back early at the end of the stream and at the time limit.
            if got < size and got - before < _LITTLE and self._link is not None:
                if time.monotonic() - start > 0.9 * self._link.limit_s:
                    raise TimedOut(self._wire.name, self._wire.no_progress(self._link))
            else:
                start, before = time.monotonic(), got
        return got

    def _check(self) -> None:
        if self._interrupt.interrupted:
            raise Interrupted(self._wire.name)
        self._wire.check_open()

    def _next_chunk(self) -> bool:
        """Read a chunk's head (RFC 9112 section 7.1); false at the last one."""
        size = self._line()
        if size == b"":  # the CRLF behind the chunk before
            size = self._line()
        try:
            self._chunk = int(size.split(b";")[0].strip(), 16)
        except ValueError:
            raise ProtocolError(self._wire.name, "malformed chunk") from None
        if self._chunk:
            return True
        while self._line():  # trailers
            pass
        self._left = 0
        return False

    def _line(self) -> bytes:
        line = bytearray()
        one = memoryview(bytearray(1))
        while True:
            end = bytes(self._rest).find(b"\n") if self._rest else -1
            if end >= 0:
                line += self._rest[: end + 1]
                self._rest = self._rest[end + 1 :]
            else:
                line += self._rest
                self._rest = self._rest[:0]
                if self._pump_one(one) == 0:
                    raise Unavailable(self._wire.name, "connection cut between chunks")
                line += one
            if line.endswith(b"\n"):
                return bytes(line).rstrip(b"\r\n")
            if len(line) > 4096:
                raise ProtocolError(self._wire.name, "endless chunk head")

    def _pump_one(self, one: memoryview) -> int:
        link = self._link
        if link is None:
            return 0
        try:
            return link.sock.recv_into(one)
        except (BlockingIOError, TimeoutError):
            raise TimedOut(self._wire.name, self._wire.no_progress(link)) from None
        except OSError as error:
            self._check()
            raise Unavailable(self._wire.name, _reason(error)) from error


class Wire:
    """Keep-alive links to one HTTP origin; safe to use from many threads.

    `timeout_s`: longest time without progress of one exchange. `name` stands in errors.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None,
        timeout_s: float,
        name: str,
        keep: int = 64,
    ) -> None:
        self.name = name
        self._host, self._port = host, port
        self._tls = tls
        self._timeout_s = timeout_s
        self._idle: deque[_Link] = deque(maxlen=keep)
        self._active: set[_Link] = set()
        self._closed = False

    def exchange(
        self,
        request: bytes,
        interrupt: Interrupt,
        *,
        bodiless: bool = False,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send a request and give its answer with the body unread.

        `bodiless`: the answer to HEAD. Raises TimedOut, Interrupted, Unavailable, ProtocolError.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        while True:
            link = self._take(interrupt, limit_s)
            try:
                reply = self._try(link, request, interrupt, bodiless)
            except BaseException:
                interrupt.detach()
                self.drop(link)
                raise
            if reply is not None:
                return reply
            interrupt.detach()
            self.drop(link)  # it had gone stale: at most as many rounds as there are idle links

    def close(self) -> None:
        """Close idle links; exchanges in flight end with Unavailable."""
        self._closed = True
        while self._idle:
            self.drop(self._idle.pop())
        for link in list(self._active):
            link.shut()

    def check_open(self) -> None:
        if self._closed:
            raise Unavailable(self.name, "closed")

    def no_progress(self, link: _Link | None) -> str:
        limit_s = self._timeout_s if link is None else link.limit_s
        return f"no progress for {limit_s:g} s"

    def keep(self, link: _Link) -> None:
        """Put a link with nothing in flight back."""
        self._active.discard(link)
        link.idle_since = time.monotonic()
        if self._closed or len(self._idle) == self._idle.maxlen:
            link.sock.close()
        else:
            self._idle.append(link)

    def drop(self, link: _Link) -> None:
        """Close a link for good."""
        self._active.discard(link)
        link.sock.close()

    def _take(self, interrupt: Interrupt, limit_s: float) -> _Link:
        self.check_open()
        oldest = time.monotonic() - _IDLE_MAX_S
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                return self._connect(interrupt, limit_s)
            if link.idle_since < oldest:
                link.sock.close()
                continue
            self._active.add(link)
            if link.limit_s != limit_s:
                link.limit(limit_s)
            interrupt.attach(link.shut)
            return link

    def _try(
        self, link: _Link, request: bytes, interrupt: Interrupt, bodiless: bool
    ) -> Reply | None:
        """One exchange; None when a kept link turned out to be closed by the server."""
        head = link.head
        got, status = 0, 0
        fields: dict[bytes, bytes] = {}
        try:
            link.sock.sendall(request)
            seen = 0
            while True:
                end = head.obj.find(b"\r\n\r\n", seen, got)  # type: ignore[attr-defined]
                if end >= 0:
                    status, fields = _parse_head(head, end, self.name)
                    if status >= 200:
                        break
                    # An interim answer (RFC 9110 section 15.2): the real one follows.
                    left = bytes(head[end + 4 : got])
                    head[: len(left)] = left
                    got, seen = len(left), 0
                    continue
                seen = max(got - 3, 0)
                head = self._room(link, head, got)
                n = link.sock.recv_into(head[got:])
                if n == 0:
                    if interrupt.interrupted:
                        raise Interrupted(self.name)
                    self.check_open()
                    if got == 0 and not link.fresh:
                        return None
                    raise Unavailable(self.name, "connection closed before an answer")
                got += n
        except (BlockingIOError, TimeoutError):
            raise TimedOut(self.name, self.no_progress(link)) from None
        except OSError as error:
            if interrupt.interrupted:
                raise Interrupted(self.name) from error
            self.check_open()
            if got == 0 and not link.fresh and not isinstance(error, ssl.SSLError):
                return None
            raise Unavailable(self.name, _reason(error)) from error
        link.fresh = False
        return Reply(
            self,
            link,
            interrupt,
            status,
            fields,
            head[end + 4 : got],
            bodiless=bodiless or status in (204, 304),
        )

    def _room(self, link: _Link, head: memoryview, got: int) -> memoryview:
        if got < len(head):
            return head
        if len(head) >= _HEAD_MAX:
            raise ProtocolError(self.name, "endless head")
        bigger = memoryview(bytearray(_HEAD_MAX))
        bigger[:got] = head
        link.head = bigger
        return bigger

    def _connect(self, interrupt: Interrupt, limit_s: float) -> _Link:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unavailable(self.name, f"{self._host}: {_reason(error)}") from error
        deadline = time.monotonic() + limit_s
        last: Exception | None = None
        for family, kind, protocol, _, address in found:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            sock = socket.socket(family, kind, protocol)
            link = _Link(sock, 0.0, tls=self._tls is not None)
            self._active.add(link)
            interrupt.attach(link.shut)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is None:
                    # Before connect: the window scale is agreed on in the handshake.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
                sock.settimeout(left_s)
                sock.connect(address)
                if self._tls is not None:
                    link.sock = self._tls.wrap_socket(sock, server_hostname=self._host)
                else:
                    sock.settimeout(None)
                link.limit(limit_s)
            except OSError as error:
                interrupt.detach()
                self.drop(link)
                last = error
                if interrupt.interrupted:
                    raise Interrupted(self.name) from error
                self.check_open()
            else:
                return link
        if isinstance(last, TimeoutError) or last is None:
            raise TimedOut(
                self.name, f"no connection to {self._host}:{self._port} in {limit_s:g} s"
            )
        raise Unavailable(self.name, f"{self._host}:{self._port}: {_reason(last)}") from last


def _parse_head(head: memoryview, end: int, name: str) -> tuple[int, dict[bytes, bytes]]:
    lines = bytes(head[:end]).split(b"\r\n")
    first = lines[0]
    if not first.startswith(b"HTTP/1.") or not first[9:12].isdigit():
        raise ProtocolError(name, "answer is not HTTP/1")
    fields: dict[bytes, bytes] = {}
    for line in lines[1:]:
        field, found, value = line.partition(b":")
        if not found:
            raise ProtocolError(name, "malformed header")
        fields[field.lower()] = value.strip()
    if first.startswith(b"HTTP/1.0") and b"connection" not in fields:
        fields[b"connection"] = b"close"
    return int(first[9:12]), fields


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
