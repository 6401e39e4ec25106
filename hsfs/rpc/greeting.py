"""What both clients make of the server's answer to HELLO."""

from __future__ import annotations

from hsfs.core.errors import Unsupported
from hsfs.proto import messages as m
from hsfs.proto.frames import PROTOCOL_VERSION, decode_answer, decode_body, decode_error


def read_welcome(body: bytes) -> m.Welcome:
    """The welcome in a frame body. Raises what the server refused with, Unsupported,
    ProtocolError."""
    answer = decode_answer(body)
    if answer.status:
        raise decode_error(answer)[0]
    welcome: m.Welcome = decode_body(m.RESULT_DECODERS[m.Op.HELLO], answer.body, "welcome")
    if welcome.version != PROTOCOL_VERSION:
        raise Unsupported("metadata server", f"speaks protocol {welcome.version}")
    return welcome
