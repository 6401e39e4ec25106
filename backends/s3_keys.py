"""How keys and versions are written for S3: paths of requests, canonical keys, ETags."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote_from_bytes

from hsfs.core.types import Version

_ODD: Final = re.compile(rb"[\x00-\x1f\x7f]|(?:^|/)\.{0,2}(?:/|$)")


def is_canonical(key: bytes) -> bool:
    """Whether obstore asks for exactly this key: it rewrites others to a different object.

    Non-empty segments, none `.` or `..`, no control byte, valid UTF-8.
    """
    if _ODD.search(key) is not None:
        return False
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def quoted(key: bytes) -> str:
    """The key as the path of a request, and as SigV4 signs it: all but unreserved and `/`."""
    return quote_from_bytes(key, safe="/~")


def quoted_value(value: bytes) -> str:
    """A value of a query string, as SigV4 signs it."""
    return quote_from_bytes(value, safe="~")


def version_of(etag: bytes) -> Version:
    """The version that an ETag names: without quotes (also XML-escaped ones) and weakness mark."""
    if b"&" in etag:
        etag = etag.replace(b"&quot;", b'"').replace(b"&#34;", b'"').replace(b"&amp;", b"&")
    return Version(etag.strip().removeprefix(b"W/").strip(b'"'))


def is_md5(version: bytes) -> bool:
    """Whether an ETag has the form of a plain MD5 (multipart ETags have a part count)."""
    return len(version) == 32 and version.isalnum() and _HEX.fullmatch(version) is not None


_HEX: Final = re.compile(rb"[0-9a-f]{32}")
