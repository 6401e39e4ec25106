"""What the command hands to the process that serves a mount, and what that process says back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from hsfs.core.config import Volume, decode_volume, encode_volume
from hsfs.core.errors import ConfigError, HsfsError, from_code


@dataclass(frozen=True, slots=True)
class MountOrder:
    """`address` is that of a running metadata server, "" where the volume's own one is started or
    joined. `warnings` are what the command has found already; they stand in `status`."""

    mountpoint: str
    address: str = ""
    allow_other: bool = False
    options: tuple[str, ...] = ()
    fsname: str = "hsfs"
    strict: bool = False
    foreground: bool = False
    log: str = ""
    anonymous: bool = False


class _Envelope(msgspec.Struct):
    order: MountOrder
    volume: msgspec.Raw


def encode_order(order: MountOrder, volume: Volume) -> bytes:
    """For the process, as JSON."""
    return msgspec.json.encode(_Envelope(order, msgspec.Raw(encode_volume(volume))))


def decode_order(text: bytes) -> tuple[MountOrder, Volume]:
    """Inverse of `encode_order`. Raises ConfigError."""
    try:
        envelope = msgspec.json.decode(text, type=_Envelope)
    except msgspec.DecodeError as e:
        raise ConfigError("mount", f"unreadable order: {e}", "use hsfs mount") from e
    return envelope.order, decode_volume(bytes(envelope.volume))


def write_order(data: bytes) -> int:
    """A file descriptor, inheritable on purpose, from which a child reads the order."""
    fd = os.memfd_create("hsfs-order", 0)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class Report:
    """The process's side of the status pipe; -1 = nobody listens (foreground)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def _send(self, value: dict[str, object]) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.write(self._fd, json.dumps(value).encode() + b"\n")

    def warn(self, text: str) -> None:
        """Something that the user should know, though the mount goes on."""
        self._send({"warning": text})

    def ready(self) -> None:
        """The session serves."""
        self._send({"ready": True})
        self.close()

    def failed(self, error: HsfsError) -> None:
        """The mount did not come to be."""
        self._send(
            {
                "error": {
                    "code": error.code,
                    "what": error.what,
                    "why": error.why,
                    "next": error.next_step,
                }
            }
        )
        self.close()

    def close(self) -> None:
        """Nothing more will be said."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                os.close(fd)


def read_report(lines: Iterator[bytes]) -> Iterator[str]:
    """Warnings until the mount is ready. Raises what it failed with, HsfsError when it just
    ended."""
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if "warning" in message:
            yield str(message["warning"])
        elif "error" in message:
            error = message["error"]
            raise from_code(error["code"], error["what"], error["why"], error["next"])
        elif "ready" in message:
            return
    raise HsfsError("mount", "its process ended while starting")
