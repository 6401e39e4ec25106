"""Ranged reads of objects into the caller's memory, every answer checked.

Two transports give the bytes: the wire (http_wire: cheapest, takes every key, tells errors apart)
and, with TLS, obstore for wide ranges of canonical keys: as cheap there, and it decrypts without
the GIL, where Python takes it for every 16 KiB. obstore is only ever the fast path: whatever it
does not deliver at once is asked again on the wire.

A read is pinned: to `expect`, else to the version of its first answer, so that a read that has to
go on after a cut never mixes two versions.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping
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
_FAST_MIN: Final = 1 << 20
_ANNOUNCED_MAX: Final = 256
_PARKED_MAX: Final = 64
_PARKED_MAX_S: Final = 10.0


class Body(Protocol):
    """The rest of an answer's content, wherever it comes from."""

    @property
    def fields(self) -> Mapping[bytes, bytes]:
        """The answer's header, names in lower case (none where the transport shows none)."""

    def read_into(self, view: memoryview, /) -> int:
        """Fill `view`; fewer bytes only where the body ends, rightly or not."""

    def suspend(self) -> None: ...

    def resume(self, interrupt: Interrupt, /) -> None: ...

    def close(self) -> None: ...


class FastPath(Protocol):
    """A transport that may decline."""

    def open(
        self, key: bytes, offset: int, end: int, pin: Version | None, interrupt: Interrupt
    ) -> Parked | None:
        """The answer to a range, or None to have the wire ask. Raises Interrupted only."""

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


class Parked:
    """An answer of which `left` bytes are still to be read. `total`: the object's size, -1 where
    the answer does not tell."""

    __slots__ = ("body", "left", "since", "total", "version")

    def __init__(self, body: Body, left: int, version: Version, total: int) -> None:
        self.body = body
        self.left = left
        self.version = version
        self.total = total
        self.since = time.monotonic()


class Reader:
    """Reads objects of one bucket. All blocking, safe in many threads."""

    def __init__(self, client: Client, fast: FastPath | None) -> None:
        self._client = client
        self._fast = fast
        # Both by (key, offset of the next piece), oldest first, bounded.
        self._announced: dict[tuple[bytes, int], int] = {}
        self._parked: dict[tuple[bytes, int], Parked] = {}

    def announce(self, key: bytes, offset: int, end: int) -> None:
        """The range is about to be read piece by piece: the first piece asks for all of it, and
        the answer waits on its link for the next."""
        if len(self._announced) >= _ANNOUNCED_MAX:
            with contextlib.suppress(StopIteration, KeyError, RuntimeError):
                del self._announced[next(iter(self._announced))]
        self._announced[key, offset] = end

    def close(self) -> None:
        """Give up what waits."""
        self._sweep(0)

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
        got = self._next_piece(key, offset, view, pin, interrupt)
        if got is None:
            end = max(self._announced.pop((key, offset), 0), offset + len(view))
            answer = None
            wide = end - offset > _FAST_MIN
            if first and wide and self._fast is not None and is_canonical(key):
                answer = self._fast.open(key, offset, end, pin, interrupt)
            if answer is None:
                answer = self._over_wire(key, offset, end, pin, interrupt, patience)
            got = self._take(key, offset, view, answer)
        if got.checkable and offset == 0 and got.size == got.total:
            _check_md5(view[: got.size], got.version)
        return got

    def _next_piece(
        self, key: bytes, offset: int, view: memoryview, pin: Version | None, interrupt: Interrupt
    ) -> Chunk | None:
        """From a parked answer, if one stands at just this place."""
        if not self._parked:
            return None
        parked = self._parked.pop((key, offset), None)
        if parked is None:
            return None
        if pin is not None and pin != parked.version:
            parked.body.close()
            return None
        parked.body.resume(interrupt)
        return self._take(key, offset, view, parked)

    def _over_wire(
        self,
        key: bytes,
        offset: int,
        end: int,
        pin: Version | None,
        interrupt: Interrupt,
        patience: Patience,
    ) -> Parked:
        extra = f"Range: bytes={offset}-{end - 1}\r\n"
        if pin is not None:
            extra += f'If-Match: "{pin.decode("latin-1")}"\r\n'
        client = self._client
        reply = client.ask(
            "GET", key, "", extra, interrupt, pinned=pin is not None, timeout_s=patience.left_s
        )
        try:
            if reply.status == 416:
                return Parked(*self._behind_end(key, reply, offset, pin, interrupt))
            etag = reply.fields.get(b"etag")
            if etag is None:
                start = bytearray(4096)
                n = reply.read_into(memoryview(start))
                raise client.refuse(reply, key, bytes(start[:n]))
            version = version_of(etag)
            if pin is not None and version != pin:
                raise StaleVersion(client.name, "object changed in its bucket")
            size, total = self._position(reply, offset, end - offset)
        except BaseException:
            reply.close()
            raise
        return Parked(reply, size, version, total)

    def _take(self, key: bytes, offset: int, view: memoryview, parked: Parked) -> Chunk:
        """The next piece of an answer; what is left of it is parked for the next call."""
        body, version, total = parked.body, parked.version, parked.total
        size = min(len(view), parked.left)
        left = parked.left - size
        keep = False
        try:
            got = body.read_into(view[:size] if size < len(view) else view)
            if got < size:
                if left:
                    self.announce(key, offset + got, offset + parked.left)
                error = Unavailable(self._client.name, f"connection cut, {size - got} missing")
                raise _Cut(got, version, error)
            keep = left > 0 and size == len(view)
            if keep:
                self._park(key, offset + size, Parked(body, left, version, total))
        finally:
            if not keep:
                body.close()
        if total > _MD5_MAX or size != total or not is_md5(version):
            return Chunk(size, version, total, checkable=False)
        fields = body.fields
        # With these the ETag is no MD5.
        sealed = (
            fields.get(b"x-amz-server-side-encryption", b"").startswith(b"aws:")
            or b"x-amz-server-side-encryption-customer-algorithm" in fields
        )
        return Chunk(size, version, total, checkable=bool(fields) and not sealed)

    def _park(self, key: bytes, offset: int, parked: Parked) -> None:
        parked.body.suspend()
        before = self._parked.pop((key, offset), None)
        self._parked[key, offset] = parked
        if before is not None:
            before.body.close()
        self._sweep(_PARKED_MAX)

    def _sweep(self, most: int) -> None:
        """Drop parked answers that nobody came for: too old, or more than `most`."""
        oldest = time.monotonic() - _PARKED_MAX_S
        while self._parked:
            try:
                where = next(iter(self._parked))
                parked = self._parked[where]
                if len(self._parked) <= most and parked.since > oldest:
                    return
                parked = self._parked.pop(where)
            except (KeyError, RuntimeError):  # another thread changed it meanwhile
                continue
            parked.body.close()

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
    ) -> tuple[Reply, int, Version, int]:
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
        return reply, 0, pin or Version(b""), -1


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
