"""SOURCE on the command line: a volume file, or the address of a running metadata server."""

from __future__ import annotations

from collections.abc import Sequence

from hsfs.core.config import (
    CacheConfig,
    Volume,
    default_state,
    load_volume,
    volume_from_backends,
    volume_name,
)
from hsfs.core.errors import UsageError


def is_address(source: str) -> bool:
    """Whether SOURCE names a metadata server rather than a file."""
    return source.startswith(("hsfs://", "unix:"))


def find_volume(
    source: str | None,
    mountpoint: str,
    backends: Sequence[str] = (),
    *,
    anonymous: bool = False,
) -> tuple[Volume, str]:
    """The volume and, for a running metadata server, its address (else ""). Raises UsageError,
    ConfigError."""
    if source is None:
        return volume_from_backends(mountpoint, backends, anonymous=anonymous), ""
    if backends:
        raise UsageError("--backend", "a SOURCE names its own backends", "leave out one of the two")
    if not is_address(source):
        return load_volume(source), ""
    from hsfs.rpc.address import parse_address

    address = parse_address(source)
    name = address.volume or volume_name(mountpoint)
    state = default_state(name)
    remote = Volume(name=name, state=state, backends=(), cache=CacheConfig(state / "cache"))
    return remote, str(address)
