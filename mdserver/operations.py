"""The operations of the protocol, bound to the parts of the server that do them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from hsfs.core.config import Volume, decode_volume
from hsfs.core.errors import ConfigError, NotSupported, ProtocolError
from hsfs.core.jobs import Job
from hsfs.core.ports import Device, Listing
from hsfs.core.types import DeviceId, Info, Ino, Name, Node, Space, Version
from hsfs.mdserver.health import Health
from hsfs.mdserver.jobs import JobBoard
from hsfs.mdserver.namespace import NamespaceOperations
from hsfs.mdserver.scans import Scans
from hsfs.mdserver.server import Handler
from hsfs.mdserver.sessions import Session, Sessions
from hsfs.proto import messages as m

TAKE_WAIT_MAX_S = 30.0
_STATES = ("ok", "unreachable", "unauthorised", "missing")


class Operations:
    """`handlers()` is the server's dispatch table. `redefine` takes a new volume definition in."""

    def __init__(
        self,
        volume: Volume,
        namespace: NamespaceOperations,
        board: JobBoard,
        scans: Scans,
        health: Health,
        sessions: Sessions,
        *,
        requests: Callable[[], int],
        redefined: Callable[[Volume], None],
        store_bytes: Callable[[], int],
    ) -> None:
        self._volume = volume
        self._namespace = namespace
        self._board = board
        self._scans = scans
        self._health = health
        self._sessions = sessions
        self._requests = requests
        self._redefined = redefined
        self._store_bytes = store_bytes
        self._began_s = time.monotonic()

    def handlers(self) -> Mapping[int, Handler]:
        """op -> handler."""
        return {
            m.Op.PING: self.ping,
            m.Op.LOOKUP: self.lookup,
            m.Op.GETATTR: self.getattr,
            m.Op.LIST: self.list,
            m.Op.REVALIDATE: self.revalidate,
            m.Op.REFRESH: self.refresh,
            m.Op.WALK: self.walk,
            m.Op.INFO: self.info,
            m.Op.DEVICES: self.devices,
            m.Op.SPACE: self.space,
            m.Op.REPORT: self.report,
            m.Op.STATUS: self.status,
            m.Op.DEFINE: self.define,
            m.Op.ASSIMILATE: self.assimilate,
            m.Op.SCANS: self.scans,
            m.Op.TAKE: self.take,
            m.Op.PAGES: self.pages,
            m.Op.FINISH: self.finish,
        }

    async def ping(self, session: Session, args: m.Nothing) -> None:
        """Renews the session's lease, and those of a mover's jobs."""
        self._board.renew(session.key)

    async def lookup(self, session: Session, args: m.LookupArgs) -> Node:
        return await self._namespace.lookup(Ino(args.parent), Name(args.name))

    async def getattr(self, session: Session, args: m.InodeArgs) -> Node:
        return await self._namespace.getattr(Ino(args.ino))

    async def list(self, session: Session, args: m.ListArgs) -> Listing:
        limit = max(1, min(args.limit, m.PAGE_ENTRIES_MAX))
        return await self._namespace.list(Ino(args.ino), Name(args.after), limit)

    async def revalidate(self, session: Session, args: m.RevalidateArgs) -> Node:
        return await self._namespace.revalidate(Ino(args.ino), Version(args.version))

    async def refresh(self, session: Session, args: m.RefreshArgs) -> int:
        return await self._namespace.refresh(Ino(args.ino), args.recursive)

    async def walk(self, session: Session, args: m.WalkArgs) -> Node:
        return await self._namespace.walk(args.path)

    async def info(self, session: Session, args: m.InodeArgs) -> Info:
        return await self._namespace.info(Ino(args.ino))

    async def devices(self, session: Session, args: m.Nothing) -> Sequence[Device]:
        return self._namespace.devices()

    async def space(self, session: Session, args: m.Nothing) -> Space:
        return self._namespace.space()

    async def report(self, session: Session, args: m.ReportArgs) -> None:
        """A node's word. Trouble on one node is looked into, not believed for all."""
        if args.state not in _STATES:
            raise ProtocolError("REPORT", f"unknown state {args.state!r}")
        if args.state != "ok":
            self._health.probe_soon(args.device)

    async def status(self, session: Session, args: m.Nothing) -> m.ServerStatus:
        waiting, running = self._board.counts()
        kinds = ((kind, self._sessions.count(kind)) for kind in ("mount", "mover", "tool"))
        return m.ServerStatus(
            self._volume.name,
            os.getpid(),
            self._namespace.epoch,
            self._namespace.seq,
            time.monotonic() - self._began_s,
            tuple(kinds),
            waiting,
            running,
            self._requests(),
            -1,
            self._store_bytes(),
        )

    async def define(self, session: Session, args: m.DefineArgs) -> int:
        """Take in what a volume definition adds or changes."""
        volume = decode_volume(args.volume)
        if volume.name != self._volume.name:
            raise ConfigError(
                f'volume "{volume.name}"',
                f'the server of this state serves "{self._volume.name}"',
                "give each volume a state of its own",
            )
        if volume.state != self._volume.state:
            raise ConfigError(str(volume.state), f"the state is {self._volume.state}")
        await self._namespace.reload(volume.backends)
        self._volume = volume
        self._redefined(volume)
        self._scans.start_due()
        return len(self._namespace.devices())

    async def assimilate(self, session: Session, args: m.AssimilateArgs) -> None:
        self._scans.start(args.backends, restart=args.restart)

    async def scans(self, session: Session, args: m.Nothing) -> tuple[m.ScanStatus, ...]:
        return self._scans.status()

    async def take(self, session: Session, args: m.TakeArgs) -> Sequence[Job]:
        _require_mover(session)
        wait_s = min(max(args.wait_s, 0.0), TAKE_WAIT_MAX_S)
        return await self._board.take(session.key, max(1, args.limit), wait_s)

    async def pages(self, session: Session, args: m.PagesArgs) -> None:
        _require_mover(session)
        self._board.renew(session.key)
        await self._board.pages(args)

    async def finish(self, session: Session, args: m.FinishArgs) -> None:
        _require_mover(session)
        self._board.renew(session.key)
        await self._board.finish(args)


def _require_mover(session: Session) -> None:
    if session.kind != "mover":
        raise NotSupported("jobs", f"a session of kind {session.kind} gets none")


def timeout_of(device: Device) -> float:
    """A backend's time without progress, seconds."""
    value = device.options.get("timeout", 30.0)
    return float(value) if isinstance(value, int | float) else 30.0


def backend_timeouts(devices: Callable[[], Sequence[Device]]) -> Callable[[int], float]:
    """Looks a device's timeout up."""

    def timeout_s(ident: int) -> float:
        for device in devices():
            if device.id == DeviceId(ident):
                return timeout_of(device)
        return 30.0

    return timeout_s
