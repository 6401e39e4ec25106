"""Ranged reads of objects into the caller's memory, every answer checked.

Two transports give the bytes: the wire (http_wire: cheapest in plain HTTP, takes every key) and
obstore (Rust, no GIL, cheapest with TLS; canonical keys only). obstore is only ever the fast path:
whatever it does not deliver at once is asked again on the wire, where errors are told apart.

A read is pinned: to `expect`, else to the version of its first answer, so that a read that has to
go on after a cut never mixes two versions.
"""

from __future__ import annotations

import hashlib
from typing import Final, Protocol

from hsfs.backends.http_wire import Reply
from hsfs.backends.s3_answers import content_range
from hsfs.backends.s3_client import Client, Patience
from hsfs.backends.s3_keys import is_canonical, is_md5, version_of
from hsfs.core.errors import (
    Corrupt,
    HsfsError,
    NotSupported,
    ProtocolError,
    StaleVersion,
    Unavailable,
)
from hsfs.core.ports import Interrupt
from hsfs.core.types import Version

_MD5_MAX: Final = 1 << 20
_SKIP_MAX: Final = 1 << 20


class FastPath(Protocol):
    """A transport that may decline."""

    def get(
        self, key: bytes, offset: int, view: memoryview, pin: Version | None, interrupt: Interrupt
    ) -> Chunk | None:
        """What arrived, or None to have the wire do it. Never raises for what a server does."""

    def close(self) -> None:
        """Release its connections."""


class Chunk:
    """Bytes that one answer brought: how many, of which version, and the object's size (-1 where
    the answer does not tell)."""

    __slots__ = ("checkable", "size", "total", "version")

    def __init__(self, size: int, version: Version, total: int, *, checkable: bool) -> None:
        self.size = size
        self.version = version
        self.total = total
        self.checkable = checkable  # the ETag is the MD5 of the content, if it looks like one


class Reader:
    """Reads objects of one bucket. All blocking, safe in many threads."""

    def __init__(self, client: Client, fast: FastPath | None) -> None:
        self._client = client
        self._fast = fast

    def read_into(
        self,
        key: bytes,
        offset: int,
        view: memoryview,
        expect: Version | None,
        interrupt: Interrupt,
    ) -> int:
        """Fill `view` from `offset` of the object; fewer bytes only at its end."""
        wanted = len(view)
        if wanted == 0:
            return 0
        patience = self._client.patience(interrupt)
        pin, done, first = expect, 0, True
        while True:
            try:
                got = self._once(
                    key,
                    offset + done,
                    view[done:] if done else view,
                    pin,
                    interrupt,
                    patience,
                    first=first,
                )
            except _Cut as cut:
                done += cut.size
                if cut.size:
                    patience.progress()
                    pin = cut.version
                patience.pause(cut.error)
            except StaleVersion:
                if expect is not None or pin is None:
                    raise
                pin, done = None, 0  # changed below an unpinned read: start over with the new one
                patience.pause(Unavailable(self._client.name, "object keeps changing"))
            except HsfsError as error:
                patience.pause(error)
            else:
                done += got.size
                pin = got.version
                # A server may send less than was asked for (RFC 9110 section 14.2).
                at_end = got.size == 0 or (got.total >= 0 and offset + done >= got.total)
                if done == wanted or at_end:
                    return done
                patience.progress()
            first = False

    def _once(
        self,
        key: bytes,
        offset: int,
        view: memoryview,
        pin: Version | None,
        interrupt: Interrupt,
        patience: Patience,
        *,
        first: bool,
    ) -> Chunk:
        got: Chunk | None = None
        if first and self._fast is not None and is_canonical(key):
            got = self._fast.get(key, offset, view, pin, interrupt)
        if got is None:
            got = self._over_wire(key, offset, view, pin, interrupt, patience)
        if got.checkable and offset == 0 and got.size == got.total:
            _check_md5(view[: got.size], got.version)
        return got

    def _over_wire(
        self,
        key: bytes,
        offset: int,
        view: memoryview,
        pin: Version | None,
        interrupt: Interrupt,
        patience: Patience,
    ) -> Chunk:
        wanted = len(view)
        extra = f"Range: bytes={offset}-{offset + wanted - 1}\r\n"
        if pin is not None:
            extra += f'If-Match: "{pin.decode("latin-1")}"\r\n'
        client = self._client
        reply = client.ask(
            "GET", key, "", extra, interrupt, pinned=pin is not None, timeout_s=patience.left_s
        )
        with reply:
            if reply.status == 416:
                return self._behind_end(key, reply, offset, pin, interrupt)
            etag = reply.fields.get(b"etag")
            if etag is None:
                start = bytearray(min(wanted, 4096))
                n = reply.read_into(memoryview(start))
                raise client.refuse(reply, key, bytes(start[:n]))
            version = version_of(etag)
            if pin is not None and version != pin:
                raise StaleVersion(client.name, "object changed in its bucket")
            size, total = self._position(reply, offset, wanted)
            got = reply.read_into(view[:size] if size < wanted else view)
            if got < size:
                raise _Cut(
                    got, version, Unavailable(client.name, f"connection cut, {size - got} missing")
                )
            encryption = reply.fields.get(b"x-amz-server-side-encryption", b"")
            checkable = (
                total <= _MD5_MAX
                and is_md5(version)
                and not encryption.startswith(b"aws:")
                and b"x-amz-server-side-encryption-customer-algorithm" not in reply.fields
            )
            return Chunk(size, version, total, checkable=checkable)

    def _position(self, reply: Reply, offset: int, wanted: int) -> tuple[int, int]:
        """How many bytes of the body are ours, and the object's size; the body stands at the
        first of them afterwards. Raises ProtocolError, NotSupported, Unavailable."""
        name = self._client.name
        length = reply.length
        value = reply.fields.get(b"content-range")
        if value is not None:
            # Some servers send a right range with status 200.
            found = content_range(value)
            if found is None:
                raise ProtocolError(name, "malformed Content-Range")
            start, end, total = found
            if start != offset or end > offset + wanted:
                raise ProtocolError(name, "another range than the one that was asked for")
            if length is not None and length != end - start:
                raise Unavailable(name, "Content-Length and Content-Range disagree")
            return end - start, total
        if reply.status == 206:
            raise ProtocolError(name, "a range without Content-Range")
        if length is None:
            raise NotSupported(name, "the server sends neither range nor length")
        if offset > _SKIP_MAX:
            raise NotSupported(name, "the server ignores ranges")
        if offset >= length:
            return 0, length
        if offset:
            skipped = reply.read_into(memoryview(bytearray(offset)))
            if skipped < offset:
                raise Unavailable(name, "connection cut")
        return min(wanted, length - offset), length

    def _behind_end(
        self, key: bytes, reply: Reply, offset: int, pin: Version | None, interrupt: Interrupt
    ) -> Chunk:
        """The range lies behind the end: proven, where a version was asked for, by the answer's
        own ETag or by one more question."""
        fields, name = reply.fields, self._client.name
        reply.drain()
        total = fields.get(b"content-range", b"").rpartition(b"/")[2]
        if total.isdigit() and int(total) > offset:
            raise ProtocolError(name, "416 for a range inside the object")
        if pin is not None and b"etag" not in fields:
            with self._client.ask("HEAD", key, "", "", interrupt, pinned=True) as head:
                fields = head.fields
            length = fields.get(b"content-length", b"")
            if length.isdigit() and int(length) > offset:
                raise StaleVersion(name, "object changed in its bucket")
        if pin is not None and version_of(fields.get(b"etag", b"")) != pin:
            raise StaleVersion(name, "object changed in its bucket")
        return Chunk(0, pin or Version(b""), -1, checkable=False)


class _Cut(Exception):
    """The body ended early after `size` good bytes of `version`."""

    def __init__(self, size: int, version: Version, error: Unavailable) -> None:
        super().__init__(error)
        self.size = size
        self.version = version
        self.error = error


def _check_md5(content: memoryview, version: Version) -> None:
    if hashlib.md5(content, usedforsecurity=False).hexdigest().encode() != version:
        raise Corrupt(
            "object",
            "its content is not what its ETag says",
            "read it with another tool: either the network path or the stored object is damaged",
        )
