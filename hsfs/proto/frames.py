"""Frames of the metadata RPC: a sans-IO codec for both ends.

A frame is `u32 length (big endian) | msgpack array`:

    request  [id, op, request_id | nil, args]
    reply    [id, 0, epoch, seq, result]
    error    [id, errno, code, text, detail]
    push     [0, epoch, seq_from, seq_to, records | nil]

Ids are chosen by the client, never 0, and used once per connection. `seq` is the journal position
that a reply was read at; a push covers the journal range [seq_from, seq_to] without a gap, and one
whose records are nil says that the server dropped records: forget everything. The body of a frame
holds at most `FRAME_MAX` bytes. Whatever the bytes, only ProtocolError leaves this module.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from hsfs.core.errors import HsfsError, ProtocolError, Throttled, from_code
from hsfs.core.types import Wire

PROTOCOL_VERSION: Final = 1
FRAME_MAX: Final = 1024 * 1024 + 64 * 1024
_HEADER: Final = 4
_ID_MAX: Final = 2**63 - 1

T = TypeVar("T")


class Detail(Wire, frozen=True, array_like=True, gc=False):
    """The rest of an error: cause, advice, patience asked for (seconds), journal position."""

    why: str = ""
    next_step: str = ""
    retry_after_s: float = 0.0
    seq: int = 0


class Request(Wire, frozen=True, array_like=True, gc=False):
    """A decoded request; `args` still encoded, since the op says what they are."""

    id: int
    op: int
    request_id: bytes | None
    args: msgspec.Raw


class Answer(Wire, frozen=True, array_like=True, gc=False):
    """What a client receives: a reply (`status` 0), an error or a push (`id` 0).

    The fields carry other things in each form; see the module's table. `body` is still encoded.
    """

    id: int
    status: int
    second: int | str
    third: int | str
    body: msgspec.Raw


class Splitter:
    """Cuts a byte stream into frame bodies. Fed with any pieces; no I/O."""

    __slots__ = ("_rest", "_wanted")

    def __init__(self) -> None:
        self._rest = bytearray()
        self._wanted = _HEADER  # no frame can end before so many bytes are there

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes. Raises ProtocolError: the stream is beyond repair."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        bodies: list[bytes] = []
        at, size = 0, len(data)
        self._wanted = _HEADER
        while size - at >= _HEADER:
            length = int.from_bytes(data[at : at + _HEADER], "big")
            if length > FRAME_MAX or length == 0:
                raise ProtocolError("metadata connection", f"frame of {length} bytes")
            end = at + _HEADER + length
            if end > size:
                self._wanted = _HEADER + length
                break
            bodies.append(data[at + _HEADER : end])
            at = end
        if at < size:
            self._rest += data[at:]
        return bodies

    @property
    def partial(self) -> bool:
        """Whether the stream stands inside a frame."""
        return bool(self._rest)


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode
_decode_detail = msgspec.msgpack.Decoder(Detail).decode


def _framed(body: bytes, what: str) -> bytes:
    if len(body) > FRAME_MAX:
        raise ProtocolError(what, f"frame of {len(body)} bytes is over the limit")
    return len(body).to_bytes(_HEADER, "big") + body


def encode_request(ident: int, op: int, request_id: bytes | None, args: object) -> bytes:
    """One request frame. Raises ProtocolError when it is too long."""
    return _framed(_encode((ident, int(op), request_id, args)), "request")


def encode_reply(ident: int, epoch: int, seq: int, result: object) -> bytes:
    """One reply frame. Raises ProtocolError when it is too long."""
    return _framed(_encode((ident, 0, epoch, seq, result)), "reply")


def encode_error(ident: int, error: HsfsError, seq: int = 0) -> bytes:
    """One error frame; texts are cut so that it always fits."""
    patience = error.retry_after_s if isinstance(error, Throttled) else 0.0
    detail = Detail(error.why[:4096], error.next_step[:4096], patience, seq)
    return _framed(_encode((ident, error.errno, error.code, error.what[:4096], detail)), "error")


def encode_push(epoch: int, seq_from: int, seq_to: int, records: object | None) -> bytes:
    """One push frame; `records` None tells the client to forget everything up to `seq_to`."""
    return _framed(_encode((0, epoch, seq_from, seq_to, records)), "push")


def decode_request(body: bytes) -> Request:
    """Raises ProtocolError."""
    try:
        request = _decode_request(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError("request", str(error)) from error
    if not 0 < request.id <= _ID_MAX:
        raise ProtocolError("request", f"id {request.id}")
    return request


def decode_answer(body: bytes) -> Answer:
    """Raises ProtocolError."""
    try:
        return _decode_answer(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError("reply", str(error)) from error


def decode_body(decoder: msgspec.msgpack.Decoder[T], body: msgspec.Raw, what: str) -> T:
    """The typed rest of a frame. Raises ProtocolError."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(what, str(error)) from error


def decode_error(answer: Answer) -> tuple[HsfsError, int]:
    """The error of an error frame and the journal position of it. Raises ProtocolError."""
    try:
        detail = _decode_detail(answer.body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError("error reply", str(error)) from error
    leaf = from_code(str(answer.second), str(answer.third), detail.why, detail.next_step)
    if isinstance(leaf, Throttled):
        leaf.retry_after_s = detail.retry_after_s
    return leaf, detail.seq
