"""Backend URLs: the part that names the place, and the options that may follow it."""

from __future__ import annotations

from urllib.parse import parse_qsl


def split_url_options(url: str) -> tuple[str, dict[str, str]]:
    """The URL without its `?key=value&...`, and those pairs with percent signs decoded.

    A key that is given twice keeps its last value; a key without a value has the value "".
    """
    bare, _, query = url.partition("?")
    return bare, dict(parse_qsl(query, keep_blank_values=True))


def scheme_of(url: str) -> str:
    """The scheme in lower case, "" where there is none."""
    scheme, found, _ = url.partition(":")
    return scheme.lower() if found else ""
