"""Blocking TCP for ONC RPC: for lanes and for the few calls that find and mount an export.

Deadlines are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO): each wait ends after `timeout_s`, and a wait
that moved bytes may be followed by another. Fewer than 1,000 bytes in a whole wait is no progress.
A wire on which anything went wrong is closed, never used again.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import socket
import struct
import time

from hsfs.backends.nfs_requests import Answer, Request, Steps, T, check_reply
from hsfs.core.errors import ProtocolError, TimedOut, Unavailable
from hsfs.proto import nfs3, rpc

PROGRESS_MIN = 1000  # bytes in one wait that count as progress
_RECORD_MAX = rpc.RECORD_MAX
_TRIES = 64
_xids = itertools.count(random.getrandbits(31))


class ConnectionLost(Unavailable):
    """The connection broke or could not be made: the call may be sent again on a new one."""


def next_xid() -> int:
    """A transaction id that no call in flight has."""
    return next(_xids) & 0xFFFFFFFF


def new_socket(family: int) -> socket.socket:
    """A TCP socket; as root bound to a reserved port, which exports without `insecure` ask for."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        if os.geteuid() == 0:
            _bind_reserved(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_reserved(sock: socket.socket) -> None:
    any_address = "::" if sock.family == socket.AF_INET6 else ""
    # Ports of closed connections may be taken at once; `connect` finds out which of them the
    # server still remembers.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for port in random.sample(range(665, 1023), _TRIES):
        try:
            sock.bind((any_address, port))
        except PermissionError:
            return  # root of a user namespace: an unreserved port is all there is
        except OSError:
            continue
        return


class Wire:
    """One connection. `stop` may be called from any thread and ends whatever blocks."""

    def __init__(self, address: tuple[int, tuple[object, ...]], timeout_s: float) -> None:
        self._family, self._address = address
        self.timeout_s = timeout_s
        self.sock = self._new()

    def _new(self) -> socket.socket:
        sock = new_socket(self._family)
        limit = struct.pack("ll", int(self.timeout_s), int(self.timeout_s % 1 * 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return sock

    def connect(self) -> None:
        """Raises ConnectionLost, TimedOut."""
        for attempt in range(_TRIES):
            try:
                self.sock.connect(self._address)
            except BlockingIOError as error:
                raise TimedOut(self.where, "no answer to the connection") from error
            except OSError as error:
                # The reserved port's last connection to this server is not forgotten yet.
                if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE) and attempt < _TRIES - 1:
                    self.sock.close()
                    self.sock = self._new()
                    continue
                raise ConnectionLost(self.where, error.strerror or str(error)) from error
            return

    @property
    def where(self) -> str:
        """Host and port, for messages."""
        return f"{self._address[0]}:{self._address[1]}"

    def stop(self) -> None:
        """Wake up whoever blocks in this wire."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self.sock.close()

    def send(self, data: bytes) -> None:
        """All of it."""
        left = memoryview(data)
        while left:
            try:
                sent = self.sock.send(left)
            except BlockingIOError as error:
                raise TimedOut(self.where, "the server takes no requests") from error
            except OSError as error:
                raise ConnectionLost(self.where, error.strerror or str(error)) from error
            left = left[sent:]

    def receive_some(self, view: memoryview) -> int:
        """At least one byte."""
        try:
            n = self.sock.recv_into(view)
        except BlockingIOError as error:
            raise TimedOut(self.where, f"no answer for {self.timeout_s:g} s") from error
        except OSError as error:
            raise ConnectionLost(self.where, error.strerror or str(error)) from error
        if n == 0:
            raise ConnectionLost(self.where, "the server closed the connection")
        return n

    def receive_exactly(self, view: memoryview) -> None:
        """Fill the view: one system call, without the interpreter's lock, while bytes come."""
        done = 0
        while done < len(view):
            began_s = time.monotonic()
            try:
                n = self.sock.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise TimedOut(self.where, f"no bytes for {self.timeout_s:g} s") from error
            except OSError as error:
                raise ConnectionLost(self.where, error.strerror or str(error)) from error
            if n == 0:
                raise ConnectionLost(self.where, "the server closed the connection")
            done += n
            waited_s = time.monotonic() - began_s
            if done < len(view) and n < PROGRESS_MIN and waited_s >= self.timeout_s * 0.9:
                raise TimedOut(self.where, f"{n} bytes in {waited_s:.0f} s")

    def receive_record(self, reader: rpc.RecordReader) -> bytes:
        """The next record."""
        chunk = memoryview(bytearray(65536))
        while True:
            records = reader.feed(chunk[: self.receive_some(chunk)])
            if records:
                return records[0]

    def call(
        self, program: int, version: int, procedure: int, credentials: bytes, arguments: bytes
    ) -> tuple[bytes, rpc.Reply]:
        """One call at a time; the record and its parsed head. Refusals of RPC are values."""
        xid = next_xid()
        self.send(rpc.call(xid, program, version, procedure, credentials, arguments))
        reader = rpc.RecordReader(_RECORD_MAX)
        record = self.receive_record(reader)
        reply = rpc.parse_reply(record)
        if reply.xid != xid:
            raise ProtocolError(self.where, "an answer to another call")
        return record, reply

    def ask(self, request: Request) -> Answer:
        """One NFS call, repeated while the server asks for patience (JUKEBOX: the file comes from
        slow storage) and the timeout lasts. Raises what `check_reply` raises."""
        deadline_s = time.monotonic() + self.timeout_s
        pause_s = 0.05
        while True:
            record, reply = self.call(
                rpc.PROGRAM_NFS,
                nfs3.VERSION,
                request.procedure,
                request.credentials,
                request.arguments,
            )
            check_reply(reply, self.where)
            answer = Answer(record, reply.body, nfs3.status_of(record, reply.body))
            if answer.status != nfs3.Status.JUKEBOX or time.monotonic() > deadline_s:
                return answer
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def run(self, steps: Steps[T]) -> T:
        """Drive an operation to its end."""
        try:
            request = next(steps)
            while True:
                request = steps.send(self.ask(request))
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
