"""The operations of a mount's control socket: status, stats, info, refresh, warmup, evict, umount.

`status`, `stats` and `umount` wait for nobody: neither a backend nor the metadata server.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import trio

from hsfs.cli.mount_backends import OK, Health, MountBackends
from hsfs.cli.process_limits import resident_bytes
from hsfs.cli.records import Record
from hsfs.core.errors import Busy, HsfsError, InvalidName, NotADirectory, NotFound, UsageError
from hsfs.core.ports import ChunkStore, Device, Listing
from hsfs.core.types import (
    ROOT_INO,
    FileType,
    FileVersion,
    Info,
    Ino,
    Name,
    Node,
    Replica,
    Version,
)
from hsfs.rpc.control_server import Json, Progress, error_json
from hsfs.vfs.filesystem import Vfs

_MDS_PATIENCE_S = 0.3
_WARMERS = 8
_WARM_QUEUE = 1024
_PROGRESS_S = 0.25
_ERRORS_SHOWN = 20
_LINKS_MAX = 40
_TYPE_WORDS = {
    FileType.FILE: "file",
    FileType.DIRECTORY: "directory",
    FileType.SYMLINK: "symlink",
    FileType.FIFO: "fifo",
    FileType.SOCKET: "socket",
    FileType.CHARACTER: "character device",
    FileType.BLOCK: "block device",
}


class Metadata(Protocol):
    """What is asked of the metadata server here."""

    async def lookup(self, parent: Ino, name: Name) -> Node: ...
    async def getattr(self, ino: Ino) -> Node: ...
    async def list(self, ino: Ino, after: Name, limit: int) -> Listing: ...
    async def refresh(self, ino: Ino, recursive: bool) -> int: ...
    async def devices(self) -> Sequence[Device]: ...
    async def info(self, ino: Ino) -> Info: ...


@dataclass(slots=True)
class Facts:
    """What the mount knows of itself."""

    record: Record
    session: str
    session_reason: str
    allow_other: bool
    memory_limit: int
    notes: list[str] = field(default_factory=list)


class MountControl:
    """See the module. `end` starts the end of the mount; `force` = wait for nothing."""

    def __init__(
        self,
        *,
        facts: Facts,
        mds: Metadata,
        connected: Callable[[], bool],
        vfs: Vfs,
        store: ChunkStore,
        backends: MountBackends,
        end: Callable[[bool], None],
    ) -> None:
        self._facts = facts
        self._mds = mds
        self._connected = connected
        self._vfs = vfs
        self._store = store
        self._backends = backends
        self._end = end
        self._devices: Sequence[Device] = ()
        self._heard: dict[str, tuple[str, str]] = {}
        self._began = time.monotonic()

    async def handle(self, op: str, args: Json, progress: Progress) -> Json:
        """Answer one call. Raises leaves of HsfsError."""
        operations: dict[str, Callable[[Json, Progress], Awaitable[Json]]] = {
            "status": self._status,
            "stats": self._stats,
            "info": self._info,
            "refresh": self._refresh,
            "warmup": self._warmup,
            "evict": self._evict,
            "umount": self._umount,
        }
        if op not in operations:
            raise UsageError(f"control call {op!r}", "is unknown to this mount")
        return await operations[op](args, progress)

    # --- status, stats, umount: wait for nobody ------------------------------------------------

    async def _status(self, args: Json, progress: Progress) -> Json:
        facts = self._facts
        record = facts.record
        mds_state, why = "ok", ""
        try:
            with trio.fail_after(_MDS_PATIENCE_S):
                self._devices = await self._mds.devices()
        except (HsfsError, trio.TooSlowError) as e:
            mds_state = "slow" if self._connected() else "unreachable"
            why = str(e) if isinstance(e, HsfsError) else ""
        usage = self._store.usage()
        self._hear_readers()
        backends = [self._backend(health) for health in self._backends.health()]
        notes = list(facts.notes)
        if usage.trouble:
            notes.append(f"the cache is out of use: {usage.trouble}")
        if mds_state != "ok":
            notes.append(f"the metadata server is {mds_state}" + (f": {why}" if why else ""))
        degraded = usage.trouble or mds_state == "unreachable"
        degraded = degraded or any(backend["state"] != OK for backend in backends)
        return {
            "mountpoint": record.mountpoint,
            "pid": record.pid,
            "volume": record.volume,
            "state": "degraded" if degraded else "ok",
            "session": facts.session,
            "session_reason": facts.session_reason,
            "passthrough": False,
            "read_only": True,
            "allow_other": facts.allow_other,
            "staging_bytes": 0,
            "cache_bytes": usage.bytes,
            "cache_files": usage.files,
            "cache_size": usage.size,
            "cache_trouble": usage.trouble,
            "memory_bytes": resident_bytes(),
            "memory_limit": facts.memory_limit,
            "uptime_s": round(time.monotonic() - self._began, 1),
            "mds": mds_state,
            "log": record.log,
            "notes": notes,
            "backends": backends,
        }

    def _hear_readers(self) -> None:
        """Trouble that reads met since the last look counts until a probe says otherwise."""
        devices = self._vfs.stats().get("devices")
        if not isinstance(devices, dict):
            return
        for device, seen in devices.items():
            heard = (str(seen.get("state", "")), str(seen.get("why", "")))
            if self._heard.get(device) != heard:
                self._heard[device] = heard
                if heard[0] in ("unreachable", "unauthorised"):
                    self._backends.failed(int(device), *heard)

    def _backend(self, health: Health) -> Json:
        device = next((d for d in self._devices if d.id == health.device.id), health.device)
        state, why = health.state, health.why
        if state == OK and device.state not in (OK, "unknown", ""):
            # We reach it, the movers don't: what they say concerns listings and freshness.
            state, why = device.state, f"as the metadata server's mover sees it: {device.why}"
        return {
            "name": device.name,
            "url": device.url,
            "at": device.at,
            "state": state,
            "why": why,
            "next": health.next_step if health.state != OK else "",
            "since": round(health.since, 3),
            "as_of": seconds(device.as_of_ns),
            "scanned": device.scanned,
            "scan": device.scan_state,
        }

    async def _stats(self, args: Json, progress: Progress) -> Json:
        usage = self._store.usage()
        names = {str(h.device.id): h.device.name for h in self._backends.health()}
        front = dict(self._vfs.stats())
        fetched = front.pop("fetched", {})
        by_name: dict[str, int] = {}
        if isinstance(fetched, dict):
            by_name = {names.get(str(key), str(key)): count for key, count in fetched.items()}
        return {
            "mountpoint": self._facts.record.mountpoint,
            "fetched_bytes": sum(by_name.values()),
            "cache_hits": front.get("cache_hits", 0),
            "cache_misses": front.get("cache_misses", 0),
            "backend_bytes": by_name,
            "front": front,
            "cache": {
                "bytes": usage.bytes,
                "files": usage.files,
                "size": usage.size,
                "pinned": usage.pinned,
                "evicted_bytes": usage.evicted_bytes,
            },
            "process": {"memory_bytes": resident_bytes(), "cpu_s": round(time.process_time(), 3)},
        }

    async def _umount(self, args: Json, progress: Progress) -> Json:
        if args.get("if_idle") is True and (handles := len(self._vfs.files)):
            raise Busy(
                self._facts.record.mountpoint,
                f"{handles} files are open through another mount namespace (a container?)",
                "end those programs, or use --force",
            )
        self._end(args.get("force") is True)
        return {"ending": True}

    # --- paths -----------------------------------------------------------------------------------

    async def _resolve(self, path: str) -> Node:
        """The node at a path below the mountpoint; links in the middle are followed as far as they
        stay inside. Raises NotFound, NotADirectory."""
        node = await self._mds.getattr(ROOT_INO)
        trail = [node]
        rest = [part for part in os.fsencode(path).split(b"/") if part not in (b"", b".")]
        links = 0
        while rest:
            part = rest.pop(0)
            if part == b"..":
                trail = trail[:-1] or trail
                continue
            node = trail[-1]
            if node.attributes.type != FileType.DIRECTORY:
                raise NotADirectory(path, "a part of it is not a directory")
            try:
                child = await self._mds.lookup(Ino(node.attributes.ino), Name(part))
            except (NotFound, InvalidName):
                raise NotFound(path, "there is no such file or directory") from None
            if child.attributes.type != FileType.SYMLINK or not rest:
                trail.append(child)
                continue
            links += 1
            target = self._inside(child.target)
            if target is None or links > _LINKS_MAX:
                raise NotFound(path, "a link in it leads out of the mount")
            if child.target.startswith(b"/"):
                trail = trail[:1]
            rest = [p for p in target.split(b"/") if p not in (b"", b".")] + rest
        return trail[-1]

    def _inside(self, target: bytes) -> bytes | None:
        """A link's target as a path to walk, None when it leads elsewhere."""
        if not target.startswith(b"/"):
            return target
        root = os.fsencode(self._facts.record.mountpoint).rstrip(b"/")
        return target[len(root) :] if target.startswith(root + b"/") else None

    def _paths(self, args: Json) -> list[str]:
        paths = args.get("paths")
        if not isinstance(paths, list) or not all(isinstance(p, str) for p in paths):
            raise UsageError("control call", "has no list of paths")
        return paths

    async def _info(self, args: Json, progress: Progress) -> Json:
        items: list[Json] = []
        for path in self._paths(args):
            try:
                items.append(await self._info_one(path))
            except HsfsError as e:
                items.append({"path": path, "error": error_json(e)})
        return {"paths": items}

    async def _info_one(self, path: str) -> Json:
        node = await self._resolve(path)
        attributes = node.attributes
        info = await self._mds.info(Ino(attributes.ino))
        node = info.node
        is_file = node.attributes.type == FileType.FILE
        replicas = node.replicas if is_file and node.replicas else info.bindings
        return {
            "path": os.fsdecode(info.path) or path,
            "ino": attributes.ino,
            "type": _TYPE_WORDS[node.attributes.type],
            "size": node.attributes.size,
            "mode": f"{node.attributes.mode:04o}",
            "uid": node.attributes.uid,
            "gid": node.attributes.gid,
            "mtime": seconds(node.attributes.mtime_ns),
            "version": version_text(node.version),
            "as_of": seconds(node.as_of_ns),
            "stale": node.stale,
            "replicas": [self._replica(r, node.version) for r in replicas],
            "hidden": [self._replica(r, b"") for r in info.losers],
            "cached_bytes": self._store.cached_bytes(_file(node)) if is_file else 0,
            "dirty_bytes": 0,
            "objective": None,
            **({"target": os.fsdecode(node.target)} if node.target else {}),
        }

    def _replica(self, replica: Replica, version: bytes) -> Json:
        health = self._backends.find(replica.device)
        state = health.state if health is not None else "unknown"
        if state == OK:
            same = not version or replica.version == version
            state = "current" if same and replica.proven else "unproven"
        return {
            "backend": health.device.name if health is not None else str(replica.device),
            "key": os.fsdecode(replica.place.key),
            "version": version_text(replica.version),
            "state": state,
        }

    async def _refresh(self, args: Json, progress: Progress) -> Json:
        recursive = args.get("recursive") is not False
        run = _Count()
        async with _telling(progress, run.json):
            for path in self._paths(args):
                ino = Ino((await self._resolve(path)).attributes.ino)
                try:
                    run.entries += await self._mds.refresh(ino, recursive)
                except NotFound:
                    raise NotFound(path, "is not there any more: its source was asked") from None
                finally:
                    self._vfs.inodes.expire(ino)
        return run.json()

    # --- warmup, evict ---------------------------------------------------------------------------

    async def _files(self, path: str, node: Node) -> AsyncIterator[tuple[str, Node]]:
        """All files at and below a node, with their paths; other kinds are passed over."""
        pending = [(path, node)]
        while pending:
            where, node = pending.pop()
            if node.attributes.type == FileType.FILE:
                yield where, node
            if node.attributes.type != FileType.DIRECTORY:
                continue
            after = b""
            below = []
            while True:
                page = await self._vfs.names.page(Ino(node.attributes.ino), after)
                for name, child in zip(page.names, page.nodes, strict=True):
                    path = f"{where}/{os.fsdecode(name)}".lstrip("/")
                    if child.attributes.type == FileType.FILE:
                        yield path, child
                    elif child.attributes.type == FileType.DIRECTORY:
                        below.append((path, child))
                if not page.more or not page.names:
                    break
                after = page.names[-1]
            pending.extend(reversed(below))

    async def _warmup(self, args: Json, progress: Progress) -> Json:
        roots = [(path, await self._resolve(path)) for path in self._paths(args)]
        run = _Warmup()
        send, receive = trio.open_memory_channel[tuple[str, Node]](_WARM_QUEUE)

        async def find() -> None:
            async with send:
                for path, node in roots:
                    try:
                        async for item in self._files(path, node):
                            run.total_files += 1
                            run.total_bytes += item[1].attributes.size
                            await send.send(item)
                    except HsfsError as e:
                        run.failed_at(path, e)

        async def warm() -> None:
            async for path, node in receive:
                try:
                    failed = (await self._vfs.warm(os.fsencode(path))).failed
                except HsfsError as e:
                    run.failed_at(path, e)
                    continue
                if failed:
                    run.failed_at(path, HsfsError(path, "the mount's log says why"))
                else:
                    run.files += 1
                    run.bytes += node.attributes.size

        async with _telling(progress, run.json), trio.open_nursery() as nursery:
            nursery.start_soon(find)
            for _ in range(_WARMERS):
                nursery.start_soon(warm)
        return {**run.json(), "errors": run.errors}

    async def _evict(self, args: Json, progress: Progress) -> Json:
        run = _Count()
        async with _telling(progress, run.json):
            for path in self._paths(args):
                run.bytes += await self._vfs.evict(os.fsencode(path))
        return run.json()


@asynccontextmanager
async def _telling(progress: Progress, now: Callable[[], Json]) -> AsyncIterator[None]:
    """Send `now()` as progress every so often while the body runs. A caller that went away is
    noticed by the control server, which cancels us."""

    async def tell() -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                await trio.sleep(_PROGRESS_S)
                await progress(now())

    error: HsfsError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell)
        try:
            yield
        except HsfsError as e:  # as itself, not as a group of one
            error = e
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error


@dataclass(slots=True)
class _Count:
    entries: int = 0
    bytes: int = 0

    def json(self) -> Json:
        return {"entries": self.entries, "bytes": self.bytes}


@dataclass(slots=True)
class _Warmup:
    files: int = 0
    bytes: int = 0
    failed: int = 0
    total_files: int = 0
    total_bytes: int = 0
    errors: list[Json] = field(default_factory=list)

    def failed_at(self, path: str, error: HsfsError) -> None:
        self.failed += 1
        if len(self.errors) < _ERRORS_SHOWN:
            self.errors.append({"path": path, "code": error.code, "why": error.why or error.code})

    def json(self) -> Json:
        return {
            "files": self.files,
            "bytes": self.bytes,
            "failed": self.failed,
            "total_files": self.total_files,
            "total_bytes": self.total_bytes,
        }


def _file(node: Node) -> FileVersion:
    attributes = node.attributes
    return FileVersion(Ino(attributes.ino), Version(node.version), attributes.size)


def seconds(time_ns: int) -> float | None:
    """Seconds since the epoch, None for never."""
    return round(time_ns / 1e9, 6) if time_ns > 0 else None


def version_text(version: bytes) -> str:
    """A version for people: an ETag as it is, packed numbers in hex."""
    text = version.decode("ascii", "replace")
    return text if version.isascii() and text.isprintable() else version.hex()
