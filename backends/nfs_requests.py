"""NFSv3 operations as generators: they yield a Request and are sent its Answer.

The same operation so runs over the metadata connection (trio) and over a lane (a blocking socket in
a worker thread); neither the walk along a path nor the choice of credentials is written twice.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hsfs.core.errors import (
    ConfigError,
    HsfsError,
    IsADirectory,
    NameTooLong,
    NotADirectory,
    NotFound,
    NotSupported,
    ProtocolError,
    StaleHandle,
    StaleVersion,
    Throttled,
    Unauthorised,
    Unavailable,
)
from hsfs.proto import nfs3, rpc
from hsfs.proto.nfs3 import Attributes, FileKind, Status

T = TypeVar("T")

_OWNERS_MAX = 4096
_DENIED = (Status.ACCES, Status.PERM)
ROOT_SQUASH = (
    'the export refuses our uid: export it with no_root_squash or set identity = "UID:GID" '
    "of a user who may read"
)


class Request(NamedTuple):
    """One call of program 100003, version 3."""

    procedure: int
    arguments: bytes
    credentials: bytes


class Answer(NamedTuple):
    """A successful RPC's results: `record[position:]` begins with the NFS status."""

    record: bytes
    position: int
    status: int


Steps = Generator[Request, Answer, T]


class Resolved(NamedTuple):
    """A path's end: its handle and what it is."""

    handle: bytes
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class _Fixed:
    credentials: bytes


class Identity:
    """Whose AUTH_SYS credentials a request carries, by the backend's `identity` option.

    `"owner"`: a request that is refused is sent again as the owner of the file or directory, which
    GETATTR (never refused) tells; the owner that helped is tried first from then on. So an export
    of one user's files costs nothing extra under root_squash, and all files readable to the NAS's
    own users are readable here. `"caller"`: the uid, gid and groups of this process. `"UID:GID"`:
    these numbers.

    Raises ConfigError for any other word. Safe to use from any thread.
    """

    def __init__(self, option: str) -> None:
        self._machine = socket.gethostname().encode(errors="replace")
        self._learns = option == "owner"
        self._owners: dict[bytes, bytes] = {}
        if option in ("owner", "caller"):
            groups = sorted(set(os.getgroups()) - {os.getegid()})
            self._default = rpc.auth_sys(self._machine, os.geteuid(), os.getegid(), groups)
            return
        uid, colon, gid = option.partition(":")
        if not colon or not (uid.isascii() and uid.isdigit() and gid.isascii() and gid.isdigit()):
            raise ConfigError(
                "identity", f"{option!r} is unknown", 'use "owner", "caller" or "UID:GID"'
            )
        if max(int(uid), int(gid)) >= 1 << 32:
            raise ConfigError("identity", f"{option!r} does not fit into 32 bits")
        self._default = rpc.auth_sys(self._machine, int(uid), int(gid))

    def credentials(self, handle: bytes) -> bytes:
        """What a request about this handle is tried with first."""
        return self._owners.get(handle, self._default)

    def as_owner(self, attributes: Attributes, refused: bytes) -> bytes | None:
        """The owner's credentials, unless they are what was `refused` or may not be used."""
        if not self._learns:
            return None
        owner = rpc.auth_sys(self._machine, attributes.uid, attributes.gid)
        return None if owner == refused else owner

    def learn(self, handle: bytes, credentials: bytes) -> None:
        """These credentials were accepted where others were refused."""
        if len(self._owners) >= _OWNERS_MAX:
            self._owners.clear()
        self._owners[handle] = credentials
        self._default = credentials


def request(identity: Identity, procedure: int, arguments: bytes, handle: bytes) -> Steps[Answer]:
    """One call, sent again as the owner of `handle` where that may help."""
    credentials = identity.credentials(handle)
    answer = yield Request(procedure, arguments, credentials)
    if answer.status not in _DENIED:
        return answer
    about = yield Request(nfs3.GETATTR, nfs3.handle_arguments(handle), credentials)
    if about.status != Status.OK:
        return answer
    owner = identity.as_owner(nfs3.parse_getattr(about.record, about.position), credentials)
    if owner is None:
        return answer
    again = yield Request(procedure, arguments, owner)
    if again.status in _DENIED:
        return answer
    identity.learn(handle, owner)
    return again


def getattr_(identity: Identity, handle: bytes) -> Steps[Attributes]:
    """GETATTR."""
    answer = yield Request(
        nfs3.GETATTR, nfs3.handle_arguments(handle), identity.credentials(handle)
    )
    check(answer.status, "file")
    return nfs3.parse_getattr(answer.record, answer.position)


def lookup(identity: Identity, directory: bytes, name: bytes) -> Steps[Resolved]:
    """LOOKUP, with a GETATTR where the server leaves the attributes out."""
    arguments = nfs3.lookup_arguments(directory, name)
    answer = yield from request(identity, nfs3.LOOKUP, arguments, directory)
    check(answer.status, "name")
    found = nfs3.parse_lookup(answer.record, answer.position)
    attributes = found.attributes
    if attributes is None:
        attributes = yield from getattr_(identity, found.handle)
    return Resolved(found.handle, attributes)


def walk(identity: Identity, root: bytes, key: bytes) -> Steps[Resolved]:
    """The thing that a key names below the root; symbolic links are not followed."""
    if not key:
        attributes = yield from getattr_(identity, root)
        return Resolved(root, attributes)
    here = Resolved(root, _ROOT)
    for segment in key.split(b"/"):
        if here.attributes.kind != FileKind.DIR:
            raise NotADirectory("name")
        if segment in (b"", b".", b".."):
            raise NotFound("name", "no name of a file")
        here = yield from lookup(identity, here.handle, segment)
    return here


def readlink(identity: Identity, handle: bytes) -> Steps[bytes]:
    """READLINK."""
    arguments = nfs3.handle_arguments(handle)
    answer = yield from request(identity, nfs3.READLINK, arguments, handle)
    check(answer.status, "symbolic link")
    return nfs3.parse_readlink(answer.record, answer.position)


def read_directory(
    identity: Identity, handle: bytes, cookie: int, verifier: bytes, size: int, plus: bool
) -> Steps[nfs3.DirectoryPage]:
    """A page of READDIRPLUS or READDIR of about `size` bytes. Raises NotSupported where the
    server has no READDIRPLUS."""
    if plus:
        arguments = nfs3.readdirplus_arguments(handle, cookie, verifier, size, size)
        answer = yield from request(identity, nfs3.READDIRPLUS, arguments, handle)
    else:
        arguments = nfs3.readdir_arguments(handle, cookie, verifier, size // 4)
        answer = yield from request(identity, nfs3.READDIR, arguments, handle)
    check(answer.status, "directory")
    parse = nfs3.parse_readdirplus if plus else nfs3.parse_readdir
    return parse(answer.record, answer.position)


def fsstat(identity: Identity, root: bytes) -> Steps[nfs3.FsStat]:
    """FSSTAT."""
    answer = yield from request(identity, nfs3.FSSTAT, nfs3.handle_arguments(root), root)
    check(answer.status, "export")
    return nfs3.parse_fsstat(answer.record, answer.position)


def fsinfo(identity: Identity, root: bytes) -> Steps[nfs3.FsInfo]:
    """FSINFO."""
    answer = yield from request(identity, nfs3.FSINFO, nfs3.handle_arguments(root), root)
    check(answer.status, "export")
    return nfs3.parse_fsinfo(answer.record, answer.position)


_ROOT = Attributes(FileKind.DIR, *(0 for _ in range(13)))

_ERRORS: dict[int, type[HsfsError]] = {
    Status.PERM: Unauthorised,
    Status.NOENT: NotFound,
    Status.IO: Unavailable,
    Status.NXIO: Unavailable,
    Status.ACCES: Unauthorised,
    Status.NOTDIR: NotADirectory,
    Status.ISDIR: IsADirectory,
    Status.INVAL: NotSupported,
    Status.NAMETOOLONG: NameTooLong,
    Status.STALE: StaleHandle,
    Status.BADHANDLE: StaleHandle,
    Status.BAD_COOKIE: StaleVersion,
    Status.NOT_SYNC: StaleVersion,
    Status.NOTSUPP: NotSupported,
    Status.SERVERFAULT: Unavailable,
    Status.JUKEBOX: Throttled,
}


def check(status: int, what: str) -> None:
    """Raises the leaf that an NFS status means; NFS3_OK passes."""
    if status == Status.OK:
        return
    try:
        name = f"NFS3ERR_{Status(status).name}"
    except ValueError:
        name = f"NFS status {status}"
    leaf = _ERRORS.get(status, Unavailable)
    raise leaf(what, name, ROOT_SQUASH if leaf is Unauthorised else "")


def check_reply(reply: rpc.Reply, what: str) -> None:
    """Raises the leaf that a refused RPC means; SUCCESS passes."""
    status = reply.status
    if status is rpc.ReplyStatus.SUCCESS:
        return
    if status is rpc.ReplyStatus.AUTH_ERROR:
        raise Unauthorised(
            what,
            f"AUTH_SYS credentials are refused (auth_stat {reply.auth})",
            "allow sec=sys for this host, or `insecure` if this process is not root",
        )
    if status in (rpc.ReplyStatus.PROG_UNAVAIL, rpc.ReplyStatus.PROC_UNAVAIL):
        raise NotSupported(what, f"the server has no such service ({status.name})")
    if status in (rpc.ReplyStatus.PROG_MISMATCH, rpc.ReplyStatus.RPC_MISMATCH):
        raise NotSupported(what, f"the server offers versions {reply.low} to {reply.high}")
    if status is rpc.ReplyStatus.GARBAGE_ARGS:
        raise ProtocolError(what, "the server does not understand our call")
    raise Unavailable(what, status.name)
