"""Sizes and durations as people write them: `4M`, `1G`, `30s`, `12h`. K is 1024."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTP])(?:iB|B)?|B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SIZE_MAX = 1 << 62


def parse_size(text: str) -> int:
    """Bytes of `4M`, `1.5G`, `64KiB` or a bare number. Raises ValueError with the reason."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size like 4M, 1G or 500G")
    number, letter = match.groups()
    size = int(float(number) * 1024 ** _POWERS[(letter or "").upper()])
    if size > _SIZE_MAX:
        raise ValueError(f"{text!r} is too large")
    return size


def parse_duration(text: str) -> float:
    """Seconds of `30s`, `5m`, `12h`, `7d`, `250ms` or a sum such as `1h30m`. A bare number is
    refused (only 0 needs no unit). Raises ValueError with the reason."""
    stripped = text.strip()
    if stripped == "0":
        return 0.0
    total = 0.0
    at = 0
    for match in _DURATION_PART.finditer(stripped):
        if match.start() != at:
            break
        total += float(match[1]) * _SECONDS[match[2]]
        at = match.end()
    if at == 0 or at != len(stripped):
        raise ValueError(f"{text!r} is not a duration like 30s, 5m, 12h or 7d")
    return total


def format_size(size: int) -> str:
    """`4.0M`: at most four characters of number and a letter; exact below 1024."""
    if size < 1024:
        return f"{size}B"
    number = float(size)
    for letter in "KMGTPE":
        number /= 1024
        if number < 1023.95 or letter == "E":
            break
    return f"{number:.1f}{letter}"


def format_duration(seconds: float) -> str:
    """The largest unit that keeps it readable: `250ms`, `12s`, `3m20s`, `2h05m`, `3d04h`."""
    if seconds < 0:
        return "0s"
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
