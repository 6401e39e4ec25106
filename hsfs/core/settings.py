"""Every key of a volume file: its kind, its default, and where it may stand.

One table drives reading, the `?key=value` form behind a URL, `hsfs config show` and the check of
the documentation. Values are normalised here: sizes to bytes, durations to seconds, modes to
integers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from hsfs.core.units import parse_duration, parse_size

type_of = type  # `type` reads better for what a TOML value is called below
Setting = str | int | float | bool

CACHE_SIZE_MIN = 256 * 1024**2
MEMORY_LIMIT_MIN = 64 * 1024**2
FD_LIMIT_MIN = 64

FILE_SCHEMES = ("file", "memory")
OBJECT_SCHEMES = ("s3", "gs", "az")
SCHEMES = ("file", "nfs", "s3", "gs", "az", "memory")


class Unset(Enum):
    """No default: the key is absent unless it was written."""

    UNSET = 0


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `parse(value, text)` normalises or raises ValueError; `text` is set when the value
    came as text (behind a URL) and numbers and booleans have to be read from it. `schemes` limits
    a backend key to some kinds of URL. `note` is what `config show` adds."""

    parse: Callable[[object, bool], Setting]
    default: Setting | Unset = Unset.UNSET
    schemes: tuple[str, ...] = ()
    note: str = ""


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, int):
        return "a whole number"
    if isinstance(value, float):
        return "a number"
    return f"a {type_of(value).__name__}"


def _string(value: object, text: bool) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string, not {_kind(value)}")
    if not value:
        raise ValueError("must not be empty")
    if "\0" in value or "\n" in value:
        raise ValueError("must be one line")
    return value


def _boolean(value: object, text: bool) -> bool:
    if text and isinstance(value, str):
        word = value.lower()
        if word in ("", "true", "yes", "1", "on"):
            return True
        if word in ("false", "no", "0", "off"):
            return False
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {_kind(value)}")
    return value


def _whole(low: int, high: int) -> Callable[[object, bool], int]:
    def parse(value: object, text: bool) -> int:
        if text and isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"must be a whole number, not {_kind(value)}")
        if not low <= value <= high:
            raise ValueError(f"must lie between {low} and {high}, not {value}")
        return value

    return parse


def _size(low: int = 1, why: str = "") -> Callable[[object, bool], int]:
    def parse(value: object, text: bool) -> int:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(f'must be a size like "4M" or "500G", not {_kind(value)}')
        size = parse_size(value) if isinstance(value, str) else value
        if size < low:
            raise ValueError(f"{value} is too small: at least {low // 1024**2 or 1}M{why}")
        return size

    return parse


def _duration(low_s: float, high_s: float = 366 * 86400.0) -> Callable[[object, bool], float]:
    def parse(value: object, text: bool) -> float:
        if not isinstance(value, str):
            raise ValueError(f'must be a duration like "30s" or "5m", not {_kind(value)}')
        seconds = parse_duration(value)
        if not low_s <= seconds <= high_s:
            raise ValueError(f"{value!r} must lie between {low_s:g}s and {high_s / 86400:g}d")
        return seconds

    return parse


def _one_of(*words: str) -> Callable[[object, bool], str]:
    def parse(value: object, text: bool) -> str:
        quoted = ", ".join(f'"{word}"' for word in words)
        if not isinstance(value, str):
            raise ValueError(f"must be one of {quoted}, not {_kind(value)}")
        if value not in words:
            raise ValueError(f"must be one of {quoted}, not {value!r}")
        return value

    return parse


def _or(word: str, parse: Callable[[object, bool], Setting]) -> Callable[[object, bool], Setting]:
    def either(value: object, text: bool) -> Setting:
        return word if value == word else parse(value, text)

    return either


def _mode(value: object, text: bool) -> int:
    if not isinstance(value, str):
        raise ValueError(f'must be an octal string like "0644", not {_kind(value)}')
    if not re.fullmatch(r"0?[0-7]{3}", value):
        raise ValueError(f"must be an octal mode like 0644, not {value!r}")
    return int(value, 8)


def _owner(value: object, text: bool) -> str:
    if isinstance(value, str) and re.fullmatch(r"owner|caller|\d{1,10}:\d{1,10}", value):
        return value
    raise ValueError('must be "owner", "caller" or "UID:GID"')


def _rate(value: object, text: bool) -> int:
    if isinstance(value, str):
        value = value.removesuffix("/s")
        if not re.fullmatch(r"\d{1,9}", value):
            raise ValueError(f"must be requests per second like 200, not {value!r}")
        value = int(value)
    return _whole(1, 10**9)(value, text)


def _bandwidth(value: object, text: bool) -> int:
    if isinstance(value, str):
        value = value.removesuffix("/s")
    return _size(1024)(value, text)


def _later(what: str, *harmless: Setting) -> Callable[[object, bool], Setting]:
    """A key whose feature does not exist yet and must not be believed to be in force."""

    def parse(value: object, text: bool) -> Setting:
        for allowed in harmless:
            if type_of(value) is type_of(allowed) and value == allowed:
                return allowed
        raise ValueError(f"{what} is not in this version")

    return parse


def _store(value: object, text: bool) -> str:
    name = _string(value, text)
    if name.startswith(("postgresql://", "postgres://")):
        raise ValueError("the PostgreSQL store is not in this version")
    return _one_of("lmdb")(name, text)


def _address(value: object, text: bool) -> str:
    address = _string(value, text)
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(\d{1,5})", address)
    if match is None or not 0 <= int(match[2]) <= 65535:
        raise ValueError(f"must be HOST:PORT, not {address!r}")
    return address


_ID = _whole(0, 2**32 - 2)
_UNUSED = "no effect in this version"

VOLUME: Mapping[str, Key] = {
    "name": Key(_string),
    "state": Key(_string),
    "store": Key(_store, "lmdb"),
    "write_to": Key(_string, note=_UNUSED),
    "trash": Key(_duration(0), 86400.0, note=_UNUSED),
    "quota": Key(_size(), note=_UNUSED),
    "coherence": Key(_one_of("prompt", "strict"), "prompt", note=_UNUSED),
    "site": Key(_string, note=_UNUSED),
}
BACKEND: Mapping[str, Key] = {
    "name": Key(_string),
    "url": Key(_string),
    "at": Key(_string),
    "access": Key(_one_of("ro", "rw"), "ro"),
    "scan": Key(_one_of("full", "lazy"), "full"),
    "freshness": Key(_duration(0), 60.0),
    "priority": Key(_whole(0, 10**6)),
    "reconcile": Key(_or("off", _duration(60)), "off", note=_UNUSED),
    "rate": Key(_rate),
    "concurrency": Key(_whole(1, 1024)),
    "bandwidth": Key(_bandwidth),
    "timeout": Key(_duration(1, 86400), 30.0),
    "on_timeout": Key(_one_of("error", "wait"), "error"),
    "uid": Key(_ID),
    "gid": Key(_ID),
    "file_mode": Key(_mode, 0o644),
    "dir_mode": Key(_mode, 0o755),
    "verify": Key(_one_of("hash", "none"), "hash", note=_UNUSED),
    "stale_ok": Key(_boolean, False),
    "mirror_of": Key(_later("a mirror")),
    "site": Key(_string, note=_UNUSED),
    "native_names": Key(_boolean, note=_UNUSED),
    "durability": Key(_one_of("tier0", "backend"), note=_UNUSED),
    "pnfs": Key(_one_of("proxy", "real-ids", "synthetic-ids"), note=_UNUSED),
    "endpoint": Key(_string, schemes=OBJECT_SCHEMES),
    "region": Key(_string, schemes=OBJECT_SCHEMES),
    "profile": Key(_string, schemes=OBJECT_SCHEMES),
    "credentials": Key(_string, schemes=OBJECT_SCHEMES),
    "anonymous": Key(_boolean, schemes=OBJECT_SCHEMES),
    "path_style": Key(_boolean, schemes=OBJECT_SCHEMES),
    "ca_bundle": Key(_string, schemes=OBJECT_SCHEMES),
    "identity": Key(_owner, schemes=("nfs",)),
    "connections": Key(_whole(1, 64), schemes=("nfs",)),
    "port": Key(_whole(1, 65535), schemes=("nfs",)),
    "mountport": Key(_whole(1, 65535), schemes=("nfs",)),
}
CACHE: Mapping[str, Key] = {
    "dir": Key(_string),
    "size": Key(_size(CACHE_SIZE_MIN, " are needed for a useful cache")),
    "staging_size": Key(_size(), note=_UNUSED),
    "share": Key(_boolean, False, note=_UNUSED),
    "encrypt": Key(_later("encryption of the cache", False), False),
}
MOUNT: Mapping[str, Key] = {
    "memory_limit": Key(_size(MEMORY_LIMIT_MIN), 512 * 1024**2),
    "fd_limit": Key(_whole(FD_LIMIT_MIN, 2**30)),
    "readahead": Key(_or("auto", _size(0)), "auto"),
    "locks": Key(_one_of("cluster", "local", "none"), "cluster", note=_UNUSED),
    "atime": Key(_one_of("noatime", "relatime"), "noatime", note=_UNUSED),
    "site": Key(_string, note=_UNUSED),
}
MDS: Mapping[str, Key] = {
    "listen": Key(_address),
    "http": Key(_address),
    "tls": Key(_later("TLS")),
}
TABLES: Mapping[str, Mapping[str, Key]] = {
    "volume": VOLUME,
    "backend": BACKEND,
    "cache": CACHE,
    "mount": MOUNT,
    "mds": MDS,
}
