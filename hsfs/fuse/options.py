"""What a mount is asked to be, whichever session serves it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MountOptions:
    """`fsname` is the source as `/proc/mounts` shows it; `extra` are further options for the mount
    itself (`nodev`, `noatime`). `read_ahead` is the kernel's readahead in bytes, set where we may.
    `config` is what `.hsfs/config` shows.
    """

    fsname: str = "hsfs"
    subtype: str = "hsfs"
    allow_other: bool = False
    default_permissions: bool = True
    read_ahead: int = 4 << 20
    extra: tuple[str, ...] = ()
    config: bytes = b""
