"""The operations of the metadata RPC and the arrays that they carry.

Numbers are never reused and fields only appended, with defaults: a peer of another version skips
what it does not know. Every operation is idempotent, so that a client may send it again after a
lost connection; those that start work also carry a request id, and a repeated one joins the work.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import msgspec

from hsfs.core.jobs import Job, Outcome
from hsfs.core.ports import Device, Invalidation, Listing
from hsfs.core.types import DirectoryPage, Info, Node, Space, Wire

PAGE_ENTRIES_MAX: Final = 256  # of a Listing: a longer page would block the server's loop


class Op(IntEnum):
    """Operation numbers."""

    HELLO = 1
    PING = 2
    LOOKUP = 10
    GETATTR = 11
    LIST = 12
    REVALIDATE = 13
    REFRESH = 14
    WALK = 15
    INFO = 16
    DEVICES = 20
    SPACE = 21
    REPORT = 22
    STATUS = 23
    DEFINE = 24
    ASSIMILATE = 25
    SCANS = 26
    TAKE = 40
    PAGES = 41
    FINISH = 42


class Hello(Wire, frozen=True, array_like=True, gc=False):
    """First request of a connection. `kind`: mount | mover | tool. `client`: 16 random bytes, the
    same when a client reconnects; `epoch`, `seq`, `store`: what it last knew (seq 0 = nothing).
    `token` and `volume` matter over TCP only."""

    version_min: int
    version_max: int
    kind: str
    client: bytes
    token: str = ""
    volume: str = ""
    epoch: int = 0
    seq: int = 0
    store: bytes = b""
    capabilities: tuple[str, ...] = ()


class Welcome(Wire, frozen=True, array_like=True, gc=False):
    """The answer to HELLO. With `forget` the server can't tell what changed since `seq` of the
    HELLO; without it, pushes follow from there on. `definition` is a hash of the volume."""

    version: int
    epoch: int
    seq: int
    lease_s: float
    volume: str
    store: bytes
    forget: bool
    pid: int
    definition: bytes = b""
    capabilities: tuple[str, ...] = ()


class Nothing(Wire, frozen=True, array_like=True, gc=False):
    """No arguments."""


class LookupArgs(Wire, frozen=True, array_like=True, gc=False):
    parent: int
    name: bytes


class InodeArgs(Wire, frozen=True, array_like=True, gc=False):
    ino: int


class ListArgs(Wire, frozen=True, array_like=True, gc=False):
    ino: int
    after: bytes
    limit: int


class RevalidateArgs(Wire, frozen=True, array_like=True, gc=False):
    ino: int
    version: bytes


class RefreshArgs(Wire, frozen=True, array_like=True, gc=False):
    ino: int
    recursive: bool


class WalkArgs(Wire, frozen=True, array_like=True, gc=False):
    """`path`: absolute in the volume, segments joined with `/`."""

    path: bytes


class ReportArgs(Wire, frozen=True, array_like=True, gc=False):
    device: int
    state: str
    why: str


class DefineArgs(Wire, frozen=True, array_like=True, gc=False):
    """A whole volume definition (`hsfs.core.config.encode_volume`): added backends are taken in."""

    volume: bytes


class AssimilateArgs(Wire, frozen=True, array_like=True, gc=False):
    """Scan these backends (all when empty); `restart` = from the start even if one is under way."""

    backends: tuple[str, ...] = ()
    restart: bool = False


class ScanStatus(Wire, frozen=True, array_like=True, gc=False):
    """Where the scan of a backend stands. `state`: "" (never) | waiting | running | done | lazy |
    failed. `entries` seen by this scan, at `entries_per_s`; `eta_s` < 0 = unknown."""

    backend: str
    state: str
    entries: int = 0
    directories: int = 0
    entries_per_s: float = 0.0
    elapsed_s: float = 0.0
    eta_s: float = -1.0
    why: str = ""


class ServerStatus(Wire, frozen=True, array_like=True, gc=False):
    """The server as `status` shows it."""

    volume: str
    pid: int
    epoch: int
    seq: int
    uptime_s: float
    sessions: tuple[tuple[str, int], ...]  # kind -> how many
    jobs_waiting: int
    jobs_running: int
    requests: int
    inodes: int = -1
    store_bytes: int = -1


class TakeArgs(Wire, frozen=True, array_like=True, gc=False):
    """A mover asks for up to `limit` jobs and waits up to `wait_s` seconds for one."""

    limit: int
    wait_s: float


class PagesArgs(Wire, frozen=True, array_like=True, gc=False):
    """Listing results of a job, in order. A scan that is handed out again goes on at `cursor`."""

    job: int
    token: int
    pages: tuple[DirectoryPage, ...]
    cursor: bytes = b""


class FinishArgs(Wire, frozen=True, array_like=True, gc=False):
    job: int
    token: int
    outcome: Outcome


# op -> (arguments, result)
SHAPES: Final[dict[Op, tuple[type[Wire], Any]]] = {
    Op.HELLO: (Hello, Welcome),
    Op.PING: (Nothing, None),
    Op.LOOKUP: (LookupArgs, Node),
    Op.GETATTR: (InodeArgs, Node),
    Op.LIST: (ListArgs, Listing),
    Op.REVALIDATE: (RevalidateArgs, Node),
    Op.REFRESH: (RefreshArgs, int),
    Op.WALK: (WalkArgs, Node),
    Op.INFO: (InodeArgs, Info),
    Op.DEVICES: (Nothing, tuple[Device, ...]),
    Op.SPACE: (Nothing, Space),
    Op.REPORT: (ReportArgs, None),
    Op.STATUS: (Nothing, ServerStatus),
    Op.DEFINE: (DefineArgs, int),
    Op.ASSIMILATE: (AssimilateArgs, None),
    Op.SCANS: (Nothing, tuple[ScanStatus, ...]),
    Op.TAKE: (TakeArgs, tuple[Job, ...]),
    Op.PAGES: (PagesArgs, None),
    Op.FINISH: (FinishArgs, None),
}

ARGS_DECODERS: Final[dict[int, msgspec.msgpack.Decoder[Any]]] = {
    int(op): msgspec.msgpack.Decoder(args) for op, (args, _) in SHAPES.items()
}
RESULT_DECODERS: Final[dict[int, msgspec.msgpack.Decoder[Any]]] = {
    int(op): msgspec.msgpack.Decoder(result) for op, (_, result) in SHAPES.items()
}
RECORDS_DECODER: Final = msgspec.msgpack.Decoder(tuple[Invalidation, ...] | None)
