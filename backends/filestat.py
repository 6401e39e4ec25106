"""What NFS and local files have in common: identity and version made of stat fields.

Neither has a change attribute that a client can read, so a version is (fileid, size, mtime, ctime):
every write moves mtime and ctime, and ctime can't be set back by an application. Two writes within
one tick of the file system's clock can share a ctime; a version whose ctime is under two seconds
old (FAT and old ext3 tick that slowly) therefore is not `strong`.
"""

from __future__ import annotations

import struct
import threading
import time
from typing import NamedTuple

from hsfs.core.errors import ProtocolError
from hsfs.core.types import Version

SETTLED_NS = 2_000_000_000
# A server's clock this far behind ours is believed impossible; see `ServerClock`.
_SKEW_NS = 60_000_000_000

_VERSION = struct.Struct(">QQqq")
_IDENTITY = struct.Struct(">QQ")


class FileVersionFields(NamedTuple):
    """The fields of a version made by `pack_version`."""

    fileid: int
    size: int
    mtime_ns: int
    ctime_ns: int


def pack_version(fileid: int, size: int, mtime_ns: int, ctime_ns: int) -> Version:
    """The version of a file's content: 32 bytes, equal only while all four fields are."""
    return Version(_VERSION.pack(fileid, size, mtime_ns, ctime_ns))


def unpack_version(version: bytes) -> FileVersionFields:
    """The fields of a version. Raises ProtocolError when it is none of ours."""
    if len(version) != _VERSION.size:
        raise ProtocolError("version", f"{len(version)} bytes instead of {_VERSION.size}")
    return FileVersionFields(*_VERSION.unpack(version))


def pack_identity(fsid: int, fileid: int) -> bytes:
    """What stays the same when a file is renamed: 16 bytes of two unsigned 64-bit numbers."""
    return _IDENTITY.pack(fsid & 0xFFFFFFFFFFFFFFFF, fileid & 0xFFFFFFFFFFFFFFFF)


def settled(ctime_ns: int) -> bool:
    """Whether a ctime given by this machine's own clock is old enough to be `strong`."""
    return time.time_ns() - ctime_ns >= SETTLED_NS


class ServerClock:
    """Decides `strong` for times given by another machine's clock, which may be ahead or behind.

    A time that the server has shown lies in its past: from then on its clock is known to be at
    least that time plus what has passed since, whatever our own clock says. A ctime two seconds
    before this bound is settled. Files far older than any plausible skew by our own clock are
    settled too, or the first look at an old tree would find its newest file unsettled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offset_ns: int | None = None  # server time - monotonic time, a lower bound

    def observe(self, ctime_ns: int) -> int:
        """The server has just shown this ctime; the lowest that its clock can be now."""
        now_ns = time.monotonic_ns()
        with self._lock:
            if self._offset_ns is None or ctime_ns - now_ns > self._offset_ns:
                self._offset_ns = ctime_ns - now_ns
            return now_ns + self._offset_ns

    def settled(self, ctime_ns: int) -> bool:
        """Whether `ctime_ns`, just shown by the server, is provably two seconds old."""
        if self.observe(ctime_ns) - ctime_ns >= SETTLED_NS:
            return True
        return time.time_ns() - ctime_ns >= SETTLED_NS + _SKEW_NS
