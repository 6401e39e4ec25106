"""Finding and mounting an NFSv3 export: URL, portmapper, MOUNT, FSINFO.

All of it is blocking and happens at the first use, again when the export's root went stale or its
server moved to another port; a backend whose server is away can so be opened and recovers alone.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import parse_qsl, unquote_to_bytes, urlsplit

from hsfs.backends.nfs_requests import Identity, check_reply, fsinfo, walk
from hsfs.backends.nfs_wire import ConnectionLost, Wire
from hsfs.core.errors import (
    ConfigError,
    HsfsError,
    Interrupted,
    NotADirectory,
    NotFound,
    NotSupported,
    TimedOut,
    Unauthorised,
    Unavailable,
    UsageError,
)
from hsfs.proto import nfs3, rpc
from hsfs.proto.nfs3 import Attributes, FileKind, MountStatus

Options = Mapping[str, str | int | float | bool]
Address = tuple[int, tuple[object, ...]]  # family, sockaddr

_PORTMAP_PORT = 111
_NFS_PORT = 2049
_READ_MAX = 1024 * 1024  # of one READ: more gains nothing and holds the server's buffers
_PAGE = 256 * 1024  # of one READDIRPLUS reply: about 1,000 entries
_GETPORT = 3
_POLL_S = 0.2
_RETRY_ELSEWHERE = (
    MountStatus.ACCES,
    MountStatus.PERM,
    MountStatus.NOENT,
    MountStatus.NOTDIR,
    MountStatus.INVAL,
)
_V4_ONLY = (
    "the server speaks NFSv4 only",
    "mount it with the kernel's client and add that directory as file:///...",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """A backend's URL and options, checked. `port` and `mount_port` None = ask the portmapper."""

    url: str
    host: str
    port: int | None
    mount_port: int | None
    path: bytes
    timeout_s: float
    connections: int
    identity: str


@dataclass(frozen=True, slots=True)
class Export:
    """A mounted export: where its server listens and what its root is. `read_max` and `page` are
    bytes of one READ and of one listing's reply."""

    address: Address
    root: bytes
    attributes: Attributes
    read_max: int
    page: int


def parse_settings(url: str, options: Options) -> Settings:
    """Settings of `nfs://HOST[:PORT]/PATH[?port=&mountport=]`. Raises UsageError, ConfigError."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise UsageError(url, str(error)) from error
    if parts.scheme != "nfs" or not parts.hostname or parts.username is not None:
        raise UsageError(url, "not an NFS URL", "write nfs://HOST/EXPORT/PATH")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    path = b"/" + b"/".join(s for s in unquote_to_bytes(parts.path).split(b"/") if s)
    try:
        timeout_s = float(options.get("timeout", 30.0))
        connections = int(options.get("connections", 4))
    except ValueError as error:
        raise ConfigError(url, f"timeout or connections: {error}") from error
    if not 0 < timeout_s < 1e6 or not 1 <= connections <= 64:
        raise ConfigError(url, f"timeout {timeout_s:g} s, {connections} connections")
    return Settings(
        url=f"nfs://{parts.netloc}{parts.path}",
        host=parts.hostname,
        port=_port(url, query.get("port", options.get("port"))) or port,
        mount_port=_port(url, query.get("mountport", options.get("mountport"))),
        path=path,
        timeout_s=timeout_s,
        connections=connections,
        identity=str(options.get("identity", "owner")),
    )


def _port(url: str, value: str | float | None) -> int | None:
    if value is None:
        return None
    try:
        port = int(value)
    except ValueError:
        port = 0
    if not 0 < port < 65536:
        raise UsageError(url, f"{value!r} is no port")
    return port


class Holder(Protocol):
    """Who wants the export: can end the blocking calls that look for it."""

    @property
    def stopped(self) -> bool: ...

    def hold(self, wire: Wire) -> None: ...

    def release(self) -> None: ...


class Session:
    """The export of one backend, mounted on demand. Thread-safe."""

    def __init__(self, settings: Settings, identity: Identity) -> None:
        self.settings = settings
        self.identity = identity
        self._export: Export | None = None
        self._lock = threading.Lock()
        self._holder: Holder | None = None
        self._wire: Wire | None = None
        self._known = False
        self._closed = False

    @property
    def known(self) -> bool:
        """Whether the export was mounted once: from then on a refusal may be a restart."""
        return self._known

    @property
    def current(self) -> Export | None:
        """The export, if it is mounted."""
        return self._export

    def forget(self, export: Export) -> None:
        """This one's root is stale or its server does not listen there any more."""
        # No lock: a mount in progress holds it for long. At worst a newer export is mounted twice.
        if self._export is export:
            self._export = None

    def close(self) -> None:
        """No more mounting; one in progress ends."""
        self._closed = True
        wire = self._wire
        if wire is not None:
            wire.stop()

    def export(self, holder: Holder | None = None) -> Export:
        """Blocking: the export, mounted if it is not; `holder` may end that early. Raises
        ConnectionLost where the server can't be reached, TimedOut, Unavailable, Unauthorised,
        NotFound, NotSupported."""
        export = self._export
        if export is not None:
            return export
        settings = self.settings
        deadline_s = time.monotonic() + 2 * settings.timeout_s
        while not self._lock.acquire(timeout=_POLL_S):
            if holder is not None and holder.stopped:
                raise Interrupted(settings.url, "the caller has gone away")
            if time.monotonic() > deadline_s:
                raise TimedOut(settings.url, "the server does not answer MOUNT")
        try:
            if self._closed:
                raise Unavailable(settings.url, "closed")
            if self._export is None:
                self._holder = holder
                self._export = self._mount()
                self._known = True
            return self._export
        finally:
            if holder is not None:
                holder.release()
            self._holder = None
            self._wire = None
            self._lock.release()

    def _mount(self) -> Export:
        trouble: ConnectionLost | None = None
        for address in self._resolve():
            try:
                return self._mount_at(address)
            except ConnectionLost as error:  # a name may have addresses that nobody listens on
                trouble = trouble or error
        raise trouble or ConnectionLost(self.settings.url, "its name has no address")

    def _mount_at(self, address: Address) -> Export:
        settings = self.settings
        try:
            port = settings.port or self._ask_port(address, rpc.PROGRAM_NFS) or _NFS_PORT
            mount_port = settings.mount_port or self._ask_port(address, rpc.PROGRAM_MOUNT)
        except ConnectionLost as error:
            self._refuse_v4(address, settings.port or _NFS_PORT)
            raise ConnectionLost(
                settings.url,
                f"its portmapper can't be reached ({error.why})",
                "give ?port=...&mountport=... if it has none",
            ) from error
        if not mount_port:
            self._refuse_v4(address, port)
            raise ConnectionLost(
                settings.url, "the server registers no MOUNT service", "give ?mountport=..."
            )
        try:
            root, rest = self._mount_longest(_at(address, mount_port))
        except ConnectionLost:
            self._refuse_v4(address, port)
            raise
        return self._inspect(_at(address, port), root, rest)

    def _resolve(self) -> Sequence[Address]:
        host = self.settings.host
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectionLost(self.settings.url, f"{host}: {error.strerror}") from error
        return [(family, address) for family, _, _, _, address in found]

    def _open(self, address: Address) -> Wire:
        if self._closed:
            raise Unavailable(self.settings.url, "closed")
        wire = Wire(address, self.settings.timeout_s)
        self._wire = wire
        try:
            if self._holder is not None:
                self._holder.hold(wire)
            wire.connect()
        except BaseException:
            wire.close()
            raise
        return wire

    def _ask_port(self, address: Address, program: int) -> int:
        wire = self._open(_at(address, _PORTMAP_PORT))
        try:
            record, reply = wire.call(
                rpc.PROGRAM_PORTMAP, 2, _GETPORT, rpc.auth_none(), rpc.portmap_getport(program, 3)
            )
        finally:
            wire.close()
        check_reply(reply, self.settings.url)
        return rpc.parse_port(record, reply.body)

    def _refuse_v4(self, address: Address, port: int) -> None:
        """Raises NotSupported if an NFS server listens there that has no version 3."""
        try:
            wire = self._open(_at(address, port))
        except HsfsError:
            return
        try:
            _, reply = wire.call(rpc.PROGRAM_NFS, nfs3.VERSION, nfs3.NULL, rpc.auth_none(), b"")
        except HsfsError:
            return
        finally:
            wire.close()
        if reply.status is rpc.ReplyStatus.PROG_MISMATCH and reply.low > nfs3.VERSION:
            raise NotSupported(self.settings.url, *_V4_ONLY)

    def _mount_longest(self, address: Address) -> tuple[bytes, bytes]:
        """(root handle of the longest mountable part of the path, key of the rest below it)."""
        wire = self._open(address)
        try:
            segments = self.settings.path.split(b"/")[1:]
            if segments == [b""]:
                segments = []
            refusals: list[int] = []
            for n in range(len(segments), -1, -1):
                path = b"/" + b"/".join(segments[:n])
                record, reply = wire.call(
                    rpc.PROGRAM_MOUNT,
                    nfs3.MOUNT_VERSION,
                    nfs3.MOUNTPROC_MNT,
                    self.identity.credentials(b""),
                    nfs3.mount_arguments(path),
                )
                check_reply(reply, self.settings.url)
                status = nfs3.status_of(record, reply.body)
                if status == MountStatus.OK:
                    mounted = nfs3.parse_mount(record, reply.body)
                    self._check_flavors(mounted.flavors)
                    return mounted.handle, b"/".join(segments[n:])
                refusals.append(status)
                if status not in _RETRY_ELSEWHERE:
                    break
            raise self._refusal(refusals, self._exports(wire))
        finally:
            wire.close()

    def _check_flavors(self, flavors: Sequence[int]) -> None:
        if flavors and rpc.AUTH_SYS not in flavors:
            raise Unauthorised(
                self.settings.url,
                "the export takes no AUTH_SYS (Kerberos only?)",
                "export it with sec=sys for this host, or mount it with the kernel's client and "
                "add that directory as file:///...",
            )

    def _exports(self, wire: Wire) -> Sequence[bytes]:
        try:
            record, reply = wire.call(
                rpc.PROGRAM_MOUNT,
                nfs3.MOUNT_VERSION,
                nfs3.MOUNTPROC_EXPORT,
                self.identity.credentials(b""),
                b"",
            )
            check_reply(reply, self.settings.url)
            return nfs3.parse_exports(record, reply.body)
        except HsfsError:
            return ()

    def _refusal(self, statuses: Sequence[int], exports: Sequence[bytes]) -> HsfsError:
        names = b", ".join(exports[:10]).decode(errors="replace")
        listed = f"; the server exports {names}" if names else ""
        path = self.settings.path
        inside = any(path == e or path.startswith(e.rstrip(b"/") + b"/") for e in exports)
        denied = MountStatus.ACCES in statuses or MountStatus.PERM in statuses
        if denied and (inside or not exports):
            hint = "add this host to the export's client list"
            if os.geteuid() != 0:
                hint += " and export with `insecure` (this process is not root)"
            return Unauthorised(self.settings.url, "the server refuses to mount it", hint)
        if MountStatus.NOENT in statuses or denied:
            return NotFound(self.settings.url, f"no such export{listed}")
        return Unavailable(self.settings.url, f"MOUNT answers {statuses[-1]}{listed}")

    def _inspect(self, address: Address, root: bytes, rest: bytes) -> Export:
        url = self.settings.url
        wire = self._open(address)
        try:
            found = wire.run(walk(self.identity, root, rest))
            info = wire.run(fsinfo(self.identity, found.handle))
        except NotSupported as error:
            if "versions 4" in error.why:
                raise NotSupported(url, *_V4_ONLY) from error
            raise
        except NotFound as error:
            raise NotFound(url, "no such directory in the export") from error
        except Unauthorised as error:
            hint = error.next_step
            if os.geteuid() != 0:
                hint += "; export with `insecure` (this process is not root)"
            raise Unauthorised(url, error.why, hint) from error
        finally:
            wire.close()
        if found.attributes.kind != FileKind.DIR:
            raise NotADirectory(url, "a file", "name the directory that holds it")
        read_max = max(4096, min(info.read_max or _READ_MAX, _READ_MAX))
        return Export(address, found.handle, found.attributes, read_max, _PAGE)


def _at(address: Address, port: int) -> Address:
    family, sockaddr = address
    return family, (sockaddr[0], port, *sockaddr[2:])
