"""Where a key stands in a TOML text: tomllib gives values only, people need the line.

A light reader that follows table headers and `key =` starts and steps over multi-line strings and
arrays. It is used on texts that tomllib has accepted; for what it can't place (keys of inline
tables) the nearest enclosing line is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Path = tuple[str | int, ...]

_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]\]?\s*(?:#.*)?")
_ASSIGNMENT = re.compile(rf"\s*({_DOTTED})\s*=")
_ONE_KEY = re.compile(_KEY)
# What can open or close something, or hide it: strings of all four kinds, comments, brackets.
_TOKEN = re.compile(
    r'"""|\'\'\'|"(?:[^"\\]|\\.)*"|\'[^\']*\'|#.*|[\[\]{}]',
)


def _keys(dotted: str) -> tuple[str, ...]:
    return tuple(key.strip("\"'") for key in _ONE_KEY.findall(dotted))


def _scan(text: str, depth: int, quote: str) -> tuple[int, str]:
    """Bracket depth and open multi-line quote behind one more line."""
    at = 0
    while at < len(text):
        if quote:
            end = text.find(quote, at)
            if end < 0:
                return depth, quote
            at, quote = end + 3, ""
            continue
        match = _TOKEN.search(text, at)
        if match is None:
            break
        token = match[0]
        at = match.end()
        if token in ('"""', "'''"):
            quote = token
        elif token in "[{":
            depth += 1
        elif token in "]}":
            depth -= 1
    return depth, quote


def key_lines(text: str) -> Mapping[Path, int]:
    """Line (from 1) of every table and key: ("backend", 0, "url") -> 7."""
    lines: dict[Path, int] = {}
    counts: dict[tuple[str, ...], int] = {}
    table: Path = ()
    depth, quote = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if depth > 0 or quote:
            depth, quote = _scan(line, depth, quote)
            continue
        if header := _HEADER.fullmatch(line):
            names = _keys(header[2])
            if header[1] == "[[":
                index = counts.get(names, -1) + 1
                counts[names] = index
                lines.setdefault(names, number)
                table = (*names, index)
            else:
                table = names
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            path = table
            for name in _keys(assignment[1]):
                path = (*path, name)
                lines.setdefault(path, number)
            depth, quote = _scan(line[assignment.end() :], 0, "")
    return lines


def line_of(lines: Mapping[Path, int], path: Path) -> int:
    """The line of `path`, or of the nearest table around it; 1 when nothing is known."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return 1
