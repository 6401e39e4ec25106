"""How native names are shown in the mount, and back: pure, and a bijection.

A backend keeps things under *segments*: what stands between two `/` of a key or path. The mount
shows each segment as one name, or as several where it is too long. Identity unless needed; the
escape lead is `%~`:

    %~XX       a byte that no name can hold; a literal `%~` is `%~25%~7E` (hex digits upper case)
    %~e        the empty segment (`a//b`)          %~d, %~dd   the segments `.` and `..`
    NAME%~o    the object NAME beside a prefix NAME/ of the same backend
    %~m        the object whose key is the prefix itself (`p/`), when it has content
    %~+PIECE   a directory: the segment is too long and goes on inside
    %~2Ehsfs   a real `.hsfs` in the root of the mount, where `.hsfs` is ours

Object stores (FLAT) have all of these. Names of file systems (TREE) are at most 255 bytes, so that
they only need the bytes' form, and pieces where that makes them longer than a name may be.

Keys of object stores are UTF-8. A name that is not stands in the key with its odd bytes escaped in
the same way (`%~FF`), and a key of exactly that form is shown as that name.

Not every name is the form of a segment (`%~41`, `%~zz`, a piece cut elsewhere): `read` answers None
for them, nothing can have such a name and creating one is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

LEAD = b"%~"
BESIDE_END = b"%~o"
MARKER_NAME = b"%~m"
PIECE_LEAD = b"%~+"
PIECE_MAX = 200
OWN_NAME = b".hsfs"

_WHOLE = {b"": b"%~e", b".": b"%~d", b"..": b"%~dd"}
_WHOLE_BACK = {shown: raw for raw, shown in _WHOLE.items()}
_HEX = re.compile(rb"%~([0-9A-F]{2})")
_ODD = re.compile(rb"%~|[\x00/]|\A\.{0,2}\Z|\A\.hsfs\Z").search
_KEY_ESCAPES = re.compile(rb"%~([89A-F][0-9A-F])")


class Dialect(Enum):
    """The kind of names a backend has."""

    FLAT = "flat"  # object store: keys, any segment, an object and a prefix may share a name
    TREE = "tree"  # file system: no empty, `.` or `..` names, at most 255 bytes


class Form(IntEnum):
    """What a segment stands for when it is shown."""

    SEGMENT = 0  # the usual
    BESIDE = 1  # an object that has a prefix of the same name beside it
    MARKER = 2  # the object whose key is the prefix (segment b"")


@dataclass(frozen=True, slots=True)
class Native:
    """What `read` finds behind a name: the segment and the form it was shown in."""

    segment: bytes
    form: Form


_LONGEST_WHOLE = {Dialect.FLAT: PIECE_MAX, Dialect.TREE: 255}


def plain(segment: bytes) -> bool:
    """Whether the segment is surely shown as it is (a quick test: some others are, too)."""
    return len(segment) <= PIECE_MAX and _ODD(segment) is None


def show(
    segment: bytes, form: Form = Form.SEGMENT, *, dialect: Dialect, at_root: bool = False
) -> tuple[bytes, ...]:
    """The names that lead to the segment from its directory: all but the last are `%~+`
    directories. `at_root`: its directory is the root of the mount."""
    if form is Form.MARKER:
        return (MARKER_NAME,)
    end = BESIDE_END if form is Form.BESIDE else b""
    if plain(segment):
        return (segment + end,)
    if at_root and segment == OWN_NAME:
        return (b"%~2Ehsfs" + end,)
    if segment in _WHOLE:
        return (_WHOLE[segment] + end,)
    text = _key_decoded(segment) if dialect is Dialect.FLAT else segment
    text = text.replace(LEAD, b"%~25%~7E").replace(b"\0", b"%~00").replace(b"/", b"%~2F")
    if len(text) <= _LONGEST_WHOLE[dialect]:
        return (text + end,)
    names: list[bytes] = []
    while len(text) > PIECE_MAX:
        cut = _cut(text)
        names.append(PIECE_LEAD + text[:cut])
        text = text[cut:]
    names.append(_WHOLE.get(text, text) + end)
    return tuple(names)


def read(names: Sequence[bytes], *, dialect: Dialect, at_root: bool = False) -> Native | None:
    """The segment that `show` shows as `names`, or None where there is none."""
    if not names:
        return None
    if len(names) == 1 and plain(names[0]) and (dialect is Dialect.TREE or _utf8(names[0])):
        return Native(names[0], Form.SEGMENT)
    native = _parse(names, dialect)
    if native is None:
        return None
    if dialect is Dialect.TREE and (
        native.form is not Form.SEGMENT
        or native.segment in _WHOLE
        or b"\0" in native.segment
        or b"/" in native.segment
    ):
        return None
    if b"/" in native.segment:
        return None
    shown = show(native.segment, native.form, dialect=dialect, at_root=at_root)
    return native if shown == tuple(names) else None


def _parse(names: Sequence[bytes], dialect: Dialect) -> Native | None:
    if tuple(names) == (MARKER_NAME,):
        return Native(b"", Form.MARKER)
    pieces: list[bytes] = []
    for name in names[:-1]:
        if not name.startswith(PIECE_LEAD):
            return None
        pieces.append(name[len(PIECE_LEAD) :])
    last = names[-1]
    form = Form.SEGMENT
    if last.endswith(BESIDE_END):
        last, form = last[: -len(BESIDE_END)], Form.BESIDE
    if last in _WHOLE_BACK:
        pieces.append(_WHOLE_BACK[last])
    elif last:
        pieces.append(last)
    else:
        return None
    segment = _unescape(b"".join(pieces))
    if segment is None:
        return None
    return Native(_key_encoded(segment) if dialect is Dialect.FLAT else segment, form)


def _unescape(text: bytes) -> bytes | None:
    if LEAD not in text:
        return text
    out: list[bytes] = []
    at = 0
    while (lead := text.find(LEAD, at)) >= 0:
        match = _HEX.match(text, lead)
        if match is None:
            return None
        out.append(text[at:lead])
        out.append(bytes((int(match[1], 16),)))
        at = match.end()
    out.append(text[at:])
    return b"".join(out)


def _cut(text: bytes) -> int:
    """Where an escaped segment that is too long is cut: never inside an escape, and not inside a
    UTF-8 character, so that the pieces stay readable."""
    cut = PIECE_MAX
    for back in range(1, 4):
        if text.startswith(LEAD, cut - back):
            return cut - back
    for back in range(4):
        if text[cut - back] & 0xC0 != 0x80:
            return cut - back
    return cut


def _utf8(name: bytes) -> bool:
    if name.isascii():
        return True
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _key_encoded(name: bytes) -> bytes:
    """The bytes of a name as a key holds them."""
    if _utf8(name):
        return name
    text = name.decode("utf-8", "surrogateescape")
    return b"".join(
        b"%%~%02X" % (ord(c) - 0xDC00) if "\udc80" <= c <= "\udcff" else c.encode() for c in text
    )


def _key_decoded(segment: bytes) -> bytes:
    """The name that was put into a key by `_key_encoded`; any other segment is itself."""
    if LEAD not in segment:
        return segment
    name = _KEY_ESCAPES.sub(lambda match: bytes((int(match[1], 16),)), segment)
    return name if name != segment and _key_encoded(name) == segment else segment
