"""Where a metadata server listens, and the credentials that open it.

A unix socket is named by its path; paths longer than the kernel's 107 bytes are reached through
/proc/self/fd of their folder, so that the socket always lies in the volume's state. TCP is for
loopback only until there is TLS, and needs the token that lies beside the socket.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hsfs.core.config import default_state
from hsfs.core.errors import NotSupported, PermissionDenied, Unauthorised, Unavailable, UsageError

DEFAULT_PORT = 7420
SOCKET_NAME = "mds.sock"
TOKEN_NAME = "token"
_SUN_PATH_MAX = 107


@dataclass(frozen=True, slots=True)
class Address:
    """`path` of a unix socket, or `host` and `port` with the `volume` that is meant there."""

    path: Path | None = None
    host: str = ""
    port: int = 0
    volume: str = ""

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"hsfs://{host}:{self.port}/{self.volume}"


def state_address(state: Path) -> Address:
    """The socket of the server that owns a state directory."""
    return Address(path=state / SOCKET_NAME)


def parse_address(text: str) -> Address:
    """`unix:/path.sock` or `hsfs://HOST[:PORT]/VOLUME`. Raises UsageError."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/"):
            raise UsageError(text, "the socket's path must be absolute", "write unix:/path.sock")
        return Address(path=Path(path))
    url = urlsplit(text)
    volume = url.path.strip("/")
    try:
        port = url.port
    except ValueError as error:
        raise UsageError(text, str(error)) from error
    if url.scheme != "hsfs" or not url.hostname or not volume or "/" in volume or url.query:
        raise UsageError(
            text, "not the address of a metadata server", "write hsfs://HOST:7420/VOLUME"
        )
    return Address(host=url.hostname, port=DEFAULT_PORT if port is None else port, volume=volume)


def parse_listen(text: str) -> tuple[str, int]:
    """`HOST:PORT` to listen at. Raises UsageError, NotSupported (not loopback)."""
    host, colon, port = text.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(text, "not an address to listen at", "write 127.0.0.1:7420")
    return require_loopback(host), int(port)


def require_loopback(host: str) -> str:
    """A numeric loopback address for `host`. Raises NotSupported for any other host."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise NotSupported(
            host, "the metadata protocol goes over loopback only until it has TLS", "use 127.0.0.1"
        )
    return host


@contextmanager
def socket_name(path: Path) -> Iterator[str]:
    """A name for `path` that fits into a sockaddr_un while the context lasts. Raises OSError."""
    text = os.fspath(path)
    if len(os.fsencode(text)) <= _SUN_PATH_MAX:
        yield text
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def open_socket(address: Address) -> tuple[socket.socket, str | tuple[str, int]]:
    """An unconnected socket for the address and, for TCP, where to connect it.

    Raises NotSupported (not loopback).
    """
    if address.path is not None:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), os.fspath(address.path)
    host = require_loopback(address.host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock, (host, address.port)


def check_peer(sock: socket.socket, address: Address) -> None:
    """The other end of a unix socket must be us or root. Raises Unauthorised."""
    if sock.family != socket.AF_UNIX:
        return
    uid = peer_of(sock)[1]
    if uid not in (0, os.geteuid()):
        raise Unauthorised(str(address), f"the server runs as uid {uid}, not as you or root")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """pid and uid of the process at the other end of a unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def read_token(path: Path) -> str:
    """The token in a file that only its owner can read. Raises PermissionDenied, Unauthorised."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except PermissionError as error:
        raise PermissionDenied(str(path), "the token can't be read") from error
    except OSError as error:
        raise Unauthorised(
            str(path), f"no token: {error.strerror}", "set HSFS_TOKEN_FILE to a copy of it"
        ) from error
    with os.fdopen(fd, "rb") as file:
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
            raise PermissionDenied(
                str(path), "others can read the token", f"chmod 600 {path}, and change the token"
            )
        return file.read(4096).decode("ascii", "replace").strip()


def find_token(address: Address) -> str:
    """The token for a TCP address: $HSFS_TOKEN_FILE, else the volume's state on this machine.

    Unix sockets need none: "". Raises PermissionDenied, Unauthorised.
    """
    if address.path is not None:
        return ""
    named = os.environ.get("HSFS_TOKEN_FILE")
    return read_token(Path(named) if named else default_state(address.volume) / TOKEN_NAME)


def unreachable(address: Address, error: OSError) -> Unavailable:
    """What a failed connection attempt means to a person."""
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return Unavailable(str(address), "no metadata server listens there", "is it running?")
    return Unavailable(str(address), f"can't reach the metadata server: {error.strerror or error}")
