"""One page of ListObjectsV2: the request, and its XML as values.

Pages of the usual shape are cut by one regular expression (some 3 us per key with all that
follows); anything else goes through expat, which decides what is an error. Both give the same, by
test. Keys come percent-encoded, as forms encode (a space may be "+"), where the server honours
encoding-type=url, and say so in EncodingType.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import unquote_to_bytes
from xml.parsers import expat

from hsfs.backends.s3_answers import refusal
from hsfs.backends.s3_client import Client, Patience
from hsfs.backends.s3_keys import quoted_value, version_of
from hsfs.core.errors import HsfsError, ProtocolError
from hsfs.core.ports import Interrupt

PAGE: Final = 1000
_BODY_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of a listing: full key, size (bytes), time, version."""

    key: bytes
    size: int
    mtime_ns: int
    version: bytes


@dataclass(frozen=True, slots=True)
class ListPage:
    """One answer, in the server's order. `token` b"" = the last page."""

    objects: list[Listed]
    prefixes: list[bytes]
    token: bytes

    @property
    def last_key(self) -> bytes:
        """The greatest key or prefix of the page, b"" if it is empty."""
        ends = [
            part[-1] for part in ([o.key for o in self.objects[-1:]], self.prefixes[-1:]) if part
        ]
        return max(ends, default=b"")


@dataclass(slots=True)
class _Raw:
    """A page before decoding: the texts of the XML."""

    objects: list[tuple[bytes, bytes, bytes, bytes]]  # key, time, etag, size
    prefixes: list[bytes]
    token: bytes
    truncated: bool
    encoded: bool


_OWNER: Final = (
    rb"(?:<Owner>(?:\s*<(?:ID|DisplayName)>[^<]*</(?:ID|DisplayName)>|"
    rb"\s*<(?:ID|DisplayName)\s*/>)*\s*</Owner>\s*)?"
)
_CLASS: Final = rb"(?:<StorageClass>[^<]*</StorageClass>\s*)?"
_KEY: Final = rb"<Contents>\s*<Key>([^<]*)</Key>\s*"
_TIME: Final = rb"<LastModified>([^<]*)</LastModified>\s*"
_ETAG: Final = rb"<ETag>([^<]*)</ETag>\s*"
_SUMS: Final = rb"(?:<Checksum[^>/]*>[^<]*</Checksum[^>]*>\s*)*"
_SIZE: Final = rb"<Size>(\d+)</Size>\s*"
# The order of AWS and most, and the one of SeaweedFS.
_CONTENTS: Final = re.compile(
    _KEY + _TIME + _ETAG + _SUMS + _SIZE + _CLASS + _OWNER + _CLASS + rb"</Contents>"
)
_CONTENTS_TIME_LAST: Final = re.compile(
    _KEY + _ETAG + _SIZE + _OWNER + _CLASS + _TIME + _OWNER + rb"</Contents>"
)
_PREFIXES: Final = re.compile(rb"<CommonPrefixes>\s*<Prefix>([^<]*)</Prefix>\s*</CommonPrefixes>")
_TRUNCATED: Final = re.compile(rb"<IsTruncated>\s*(true|false)\s*</IsTruncated>")
_TOKEN: Final = re.compile(rb"<NextContinuationToken>([^<]*)</NextContinuationToken>")
_ENCODING: Final = re.compile(rb"<EncodingType>\s*url\s*</EncodingType>")
_ENTITY: Final = re.compile(rb"&(#x[0-9a-fA-F]{1,6}|#[0-9]{1,7}|[a-z]{2,4});")
_ENTITIES: Final = {b"amp": b"&", b"lt": b"<", b"gt": b">", b"quot": b'"', b"apos": b"'"}


def parse_page(body: bytes) -> ListPage:
    """Read a ListBucketResult. Raises ProtocolError for anything that is none."""
    raw = _cut(body)
    if raw is None:
        raw = _parse(body)
    if raw.truncated and not raw.token:
        raise ProtocolError("listing", "truncated, but without a continuation")
    decode = _unquote_plus if raw.encoded else bytes
    try:
        objects = [
            Listed(decode(key), int(size), _time_ns(time), version_of(etag))
            for key, time, etag, size in raw.objects
        ]
    except (ValueError, OverflowError) as error:
        raise ProtocolError("listing", "malformed object") from error
    prefixes = [decode(prefix) for prefix in raw.prefixes]
    return ListPage(objects, prefixes, raw.token if raw.truncated else b"")


def _unquote_plus(text: bytes) -> bytes:
    if b"+" in text:
        text = text.replace(b"+", b" ")
    return unquote_to_bytes(text) if b"%" in text else text


def _cut(body: bytes) -> _Raw | None:
    """The usual shape by regular expressions; None = let the XML parser look."""
    if b"<!" in body or b"<ListBucketResult" not in body[:300]:
        return None
    if not body.rstrip().endswith(b"</ListBucketResult>"):
        return None
    count = body.count(b"<Contents")
    objects = _CONTENTS.findall(body)
    if len(objects) != count:
        late = _CONTENTS_TIME_LAST.findall(body)
        objects = [(key, time, etag, size) for key, etag, size, time in late]
    prefixes = _PREFIXES.findall(body)
    truncated = _TRUNCATED.findall(body)
    if (
        len(objects) != count
        or len(prefixes) != body.count(b"<CommonPrefixes")
        or len(truncated) != 1
    ):
        return None
    token = _TOKEN.search(body)
    raw_token = token[1] if token else b""
    if b"&" in body:
        try:
            objects = [
                (_unescape(key), time, etag, size) if b"&" in key else (key, time, etag, size)
                for key, time, etag, size in objects
            ]
            prefixes = [_unescape(p) if b"&" in p else p for p in prefixes]
            raw_token = _unescape(raw_token)
        except ValueError:
            return None
    return _Raw(
        objects, prefixes, raw_token, truncated[0] == b"true", _ENCODING.search(body) is not None
    )


def _unescape(text: bytes) -> bytes:
    """Resolve XML references. Raises ValueError for unknown ones."""

    def resolve(found: re.Match[bytes]) -> bytes:
        name = found[1]
        if name[:2] == b"#x":
            return chr(int(name[2:], 16)).encode()
        if name[:1] == b"#":
            return chr(int(name[1:])).encode()
        try:
            return _ENTITIES[name]
        except KeyError:
            raise ValueError("unknown entity") from None

    resolved, count = _ENTITY.subn(resolve, text)
    if count != text.count(b"&"):
        raise ValueError("bare ampersand")
    return resolved


class _Collector:
    """expat's events as a `_Raw`."""

    def __init__(self) -> None:
        self.raw = _Raw([], [], b"", truncated=False, encoded=False)
        self._path: list[str] = []
        self._text: list[str] = []
        self._fields: dict[str, str] = {}

    def start(self, name: str, _attributes: object) -> None:
        self._path.append(name.rpartition(":")[2])
        self._text.clear()
        if len(self._path) == 1 and self._path[0] != "ListBucketResult":
            raise ProtocolError("listing", f"answer is a {self._path[0][:40]}")
        if len(self._path) > 32:
            raise ProtocolError("listing", "nested too deeply")
        if len(self._path) == 2:
            self._fields = {}

    def data(self, text: str) -> None:
        self._text.append(text)

    def end(self, _name: str) -> None:
        path, text = self._path, "".join(self._text)
        name, depth = path.pop(), len(path)
        self._text.clear()
        raw = self.raw
        if depth == 2:
            self._fields[name] = text
        elif depth == 1:
            fields = self._fields
            if name == "Contents":
                if not fields.keys() >= {"Key", "LastModified", "Size"}:
                    raise ProtocolError("listing", "object without key, time or size")
                raw.objects.append(
                    (
                        _encode(fields["Key"]),
                        _encode(fields["LastModified"]),
                        _encode(fields.get("ETag", "")),
                        _encode(fields["Size"]),
                    )
                )
            elif name == "CommonPrefixes":
                raw.prefixes.append(_encode(fields.get("Prefix", "")))
            elif name == "IsTruncated":
                raw.truncated = text.strip() == "true"
            elif name == "NextContinuationToken":
                raw.token = _encode(text)
            elif name == "EncodingType":
                raw.encoded = text.strip() == "url"


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _parse(body: bytes) -> _Raw:
    collector = _Collector()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = collector.start
    parser.EndElementHandler = collector.end
    parser.CharacterDataHandler = collector.data
    parser.EntityDeclHandler = _refuse_entities
    try:
        parser.Parse(body, True)
    except (expat.ExpatError, ValueError) as error:
        raise ProtocolError("listing", f"malformed XML: {error}") from error
    return collector.raw


def _refuse_entities(*_declaration: object) -> None:
    raise ProtocolError("listing", "XML with entity declarations")


_DAYS: dict[bytes, int] = {}


def _time_ns(text: bytes) -> int:
    """Whole seconds of an ISO 8601 time in UTC, in ns: HEAD gives no fractions, and one object
    shall not have two times. 0 where there is none. Raises ValueError."""
    if len(text) < 19 or text[10:11] != b"T":
        if not text.strip():
            return 0
        raise ValueError("time")
    day = _DAYS.get(text[:10])
    if day is None:
        when = datetime.strptime(text[:10].decode("ascii"), "%Y-%m-%d").replace(tzinfo=UTC)
        day = int(when.timestamp())
        if len(_DAYS) > 4096:
            _DAYS.clear()
        _DAYS[text[:10]] = day
    return (day + int(text[11:13]) * 3600 + int(text[14:16]) * 60 + int(text[17:19])) * 10**9


class PageSource:
    """Asks a bucket for pages. Blocking, safe in many threads."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def page(
        self,
        prefix: bytes,
        interrupt: Interrupt,
        *,
        delimiter: bytes = b"",
        start_after: bytes = b"",
        token: bytes = b"",
        limit: int = PAGE,
    ) -> ListPage:
        """The page behind `start_after` or `token`. Raises leaves of HsfsError."""
        query = _query(prefix, delimiter, start_after, token, limit)
        return parse_page(self._ask(query, self._client.patience(interrupt), interrupt))

    def probe(self, prefix: bytes, interrupt: Interrupt) -> None:
        """Ask for one key, with little patience: somebody waits for the verdict."""
        query = _query(prefix, b"", b"", b"", 1)
        parse_page(self._ask(query, self._client.patience(interrupt, attempts=2), interrupt))

    def _ask(self, query: str, patience: Patience, interrupt: Interrupt) -> bytes:
        client = self._client
        while True:
            try:
                with client.ask("GET", b"", query, "", interrupt, timeout_s=patience.left_s) as got:
                    client.server = got.fields.get(b"server", b"")
                    body = got.read_all(_BODY_MAX)
                if b"<Error>" not in body[:300]:
                    return body
                # An error document with status 200.
                raise refusal(500, {}, body).error(client.name, bucket="", pinned=False)
            except HsfsError as error:
                patience.pause(error)


def _query(prefix: bytes, delimiter: bytes, start_after: bytes, token: bytes, limit: int) -> str:
    """The query of a page, in the order of the names, as the signature wants them."""
    parts = []
    if token:
        parts.append(f"continuation-token={quoted_value(token)}")
    if delimiter:
        parts.append(f"delimiter={quoted_value(delimiter)}")
    parts += ["encoding-type=url", "list-type=2", f"max-keys={limit}"]
    parts.append(f"prefix={quoted_value(prefix)}")
    if start_after and not token:
        parts.append(f"start-after={quoted_value(start_after)}")
    return "&".join(parts)
