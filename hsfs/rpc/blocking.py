"""A small blocking client of the metadata server for command-line verbs: one call at a time, no
event loop, nothing reconnects."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Any, Self

from hsfs.core.errors import TimedOut, Unavailable
from hsfs.core.ports import Device, Listing
from hsfs.core.types import Info, Ino, Node, Space, Wire
from hsfs.proto import messages as m
from hsfs.proto.frames import (
    PROTOCOL_VERSION,
    Splitter,
    decode_answer,
    decode_body,
    decode_error,
    encode_request,
)
from hsfs.rpc.address import Address, check_peer, open_socket, socket_name, unreachable
from hsfs.rpc.greeting import read_welcome


class BlockingClient:
    """A tool's session; also a context manager.

    Raises in the constructor: Unavailable, TimedOut, Unauthorised, NotFound (another volume),
    Unsupported. Calls raise Unavailable or TimedOut after `timeout_s` besides their own errors;
    the client is of no use afterwards.
    """

    def __init__(
        self, address: Address, *, token: str = "", timeout_s: float = 10.0, kind: str = "tool"
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._splitter = Splitter()
        self._bodies: list[bytes] = []
        self._last_id = 1
        self._sock, target = open_socket(address)
        try:
            self._sock.settimeout(timeout_s)
            if address.path is not None:
                with socket_name(address.path) as name:
                    self._sock.connect(name)
            else:
                self._sock.connect(target)
            check_peer(self._sock, address)
            hello = m.Hello(
                PROTOCOL_VERSION,
                PROTOCOL_VERSION,
                kind,
                os.urandom(16),
                token,
                address.volume,
            )
            self._sock.sendall(encode_request(1, m.Op.HELLO, None, hello))
            self.welcome = read_welcome(self._body(time.monotonic() + timeout_s))
        except TimeoutError:
            self._sock.close()
            raise TimedOut(str(address), "the server does not answer") from None
        except OSError as error:
            self._sock.close()
            raise unreachable(address, error) from error
        except BaseException:
            self._sock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session. Idempotent."""
        self._sock.close()

    def call(self, op: m.Op, args: Wire, *, timeout_s: float | None = None) -> Any:  # noqa: ANN401
        """The result of one operation, of the type that `messages.SHAPES` names."""
        self._last_id += 1
        deadline_s = time.monotonic() + (timeout_s or self._timeout_s)
        try:
            self._sock.settimeout(self._timeout_s)
            self._sock.sendall(encode_request(self._last_id, op, os.urandom(16), args))
            while True:
                answer = decode_answer(self._body(deadline_s))
                if answer.id == self._last_id:
                    break
        except TimeoutError:
            raise TimedOut(str(self._address), "the server does not answer") from None
        except OSError as error:
            raise unreachable(self._address, error) from error
        if answer.status:
            raise decode_error(answer)[0]
        return decode_body(m.RESULT_DECODERS[op], answer.body, op.name)

    def walk(self, path: bytes) -> Node:
        """The node at an absolute path of the volume. Raises NotFound, NotADirectory."""
        node: Node = self.call(m.Op.WALK, m.WalkArgs(path), timeout_s=60)
        return node

    def list(self, ino: Ino, after: bytes = b"", limit: int = 256) -> Listing:
        """One page of a directory. Raises NotFound, NotADirectory."""
        page: Listing = self.call(m.Op.LIST, m.ListArgs(ino, after, limit), timeout_s=60)
        return page

    def refresh(self, ino: Ino, recursive: bool) -> int:
        """Ask the source about everything at or below; the number of entries seen."""
        seen: int = self.call(m.Op.REFRESH, m.RefreshArgs(ino, recursive), timeout_s=24 * 3600)
        return seen

    def info(self, ino: Ino) -> Info:
        """What the server knows of an inode. Raises NotFound."""
        info: Info = self.call(m.Op.INFO, m.InodeArgs(ino))
        return info

    def devices(self) -> tuple[Device, ...]:
        """All backends with their state."""
        devices: tuple[Device, ...] = self.call(m.Op.DEVICES, m.Nothing())
        return devices

    def space(self) -> Space:
        """statfs."""
        space: Space = self.call(m.Op.SPACE, m.Nothing())
        return space

    def status(self) -> m.ServerStatus:
        """The server about itself."""
        status: m.ServerStatus = self.call(m.Op.STATUS, m.Nothing())
        return status

    def define(self, volume: bytes) -> int:
        """Tell the server a volume definition; the number of backends that it knows then."""
        known: int = self.call(m.Op.DEFINE, m.DefineArgs(volume))
        return known

    def assimilate(self, backends: tuple[str, ...] = (), *, restart: bool = False) -> None:
        """Start scans. Raises NotFound (no such backend)."""
        self.call(m.Op.ASSIMILATE, m.AssimilateArgs(backends, restart))

    def scans(self) -> tuple[m.ScanStatus, ...]:
        """Where the scans stand."""
        scans: tuple[m.ScanStatus, ...] = self.call(m.Op.SCANS, m.Nothing())
        return scans

    def _body(self, deadline_s: float) -> bytes:
        while not self._bodies:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._sock.settimeout(left_s)
            data = self._sock.recv(256 * 1024)
            if not data:
                raise Unavailable(str(self._address), "the server closed the connection")
            self._bodies = self._splitter.feed(data)
        return self._bodies.pop(0)


def reachable(address: Address, *, timeout_s: float = 5.0) -> m.Welcome | None:
    """The welcome of the server at a unix address, or None where none listens.

    Raises as BlockingClient does when one is there and can't be used.
    """
    try:
        with BlockingClient(address, timeout_s=timeout_s) as client:
            return client.welcome
    except TimedOut:
        raise
    except Unavailable:
        return None
