"""From a URL's scheme to an open backend, with its decorators. Kinds are imported when used."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, cast

from hsfs.backends.metered import Metered
from hsfs.backends.throttled import Throttled
from hsfs.core.errors import UsageError
from hsfs.core.ports import Backend
from hsfs.core.types import DeviceId
from hsfs.core.urls import scheme_of, split_url_options

Options = Mapping[str, str | int | float | bool]
Opener = Callable[[DeviceId, str, Options], Awaitable[Backend]]

_OPENERS: Final[Mapping[str, str]] = {
    "file": "hsfs.backends.posix:open_posix",
    "memory": "hsfs.backends.memory:open_memory",
    "nfs": "hsfs.backends.nfs_backend:open_nfs",
    "s3": "hsfs.backends.s3_backend:open_s3",
}


def schemes() -> tuple[str, ...]:
    """The schemes that can be opened."""
    return tuple(sorted(_OPENERS))


def opener(url: str) -> Opener:
    """The opener for a URL's scheme, imported now. Raises UsageError for an unknown scheme."""
    where = _OPENERS.get(scheme_of(url))
    if where is None:
        known = ", ".join(f"{s}://" for s in schemes() if s != "memory")
        # The options may hold what should not be shown; the scheme is what is wrong.
        raise UsageError(split_url_options(url)[0], "unknown kind of URL", f"known are {known}")
    module, _, name = where.partition(":")
    return cast("Opener", getattr(importlib.import_module(module), name))


async def open_backend(device: DeviceId, url: str, options: Options) -> Backend:
    """The backend of a URL, metered, and throttled where `rate`, `bandwidth` or `concurrency` say
    so.

    Options in the URL (`?key=value`) count where `options` has no such key. Raises UsageError,
    ConfigError, and what the kind's own opener raises.
    """
    bare, in_url = split_url_options(url)
    every: dict[str, str | int | float | bool] = {**in_url, **options}
    backend = Metered(await opener(url)(device, bare, every))
    rate = _number(every, "rate")
    bandwidth = _number(every, "bandwidth")
    concurrency = _number(every, "concurrency")
    if rate or bandwidth or concurrency:
        return Throttled(backend, rate=rate, bandwidth=bandwidth, concurrency=int(concurrency))
    return backend


def _number(options: Options, key: str) -> float:
    """The option as a number, 0 = no limit. Raises UsageError."""
    try:
        value = float(options.get(key) or 0)
    except ValueError:
        raise UsageError(f"option {key}", "not a number") from None
    if value < 0:
        raise UsageError(f"option {key}", "is negative")
    return value
