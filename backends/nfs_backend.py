"""The `nfs://` backend: an NFSv3 client of our own.

Metadata goes over one pipelined connection (nfs_link), bytes over lanes (nfs_lanes). Files are
named by their raw handles: a native rename keeps them. A handle that the server has forgotten is
looked up again by its key, and what stands there now is described or, for a pinned read, refused.
Nothing is asked of the server before the first use.
"""

from __future__ import annotations

import os
import struct
from collections.abc import AsyncIterator, Sequence

import trio

from hsfs.backends import nfs_requests
from hsfs.backends.filestat import ServerClock, pack_identity, pack_version, unpack_version
from hsfs.backends.nfs_lanes import Lane, Lanes, ReadJob
from hsfs.backends.nfs_link import Link
from hsfs.backends.nfs_requests import Answer, Identity, Request, Resolved, Steps, T, check
from hsfs.backends.nfs_session import Options, Session, parse_settings
from hsfs.backends.nfs_wire import ConnectionLost
from hsfs.core.errors import (
    HsfsError,
    Interrupted,
    IsADirectory,
    NotADirectory,
    NotFound,
    NotSupported,
    ProtocolError,
    StaleHandle,
    StaleVersion,
    Throttled,
    Unavailable,
)
from hsfs.core.ports import Interrupt
from hsfs.core.types import (
    Capabilities,
    Cursor,
    DeviceId,
    FileType,
    ObjectStat,
    Page,
    Place,
    Space,
    Version,
)
from hsfs.proto.nfs3 import (
    GETATTR,
    Attributes,
    DirectoryEntry,
    DirectoryPage,
    FileKind,
    Status,
    handle_arguments,
    parse_getattr,
)

_READ_MAX = 8 * 1024 * 1024
_MOUNT_THREADS = 4
_BACKOFF_S, _BACKOFF_MAX_S = 0.05, 1.0
_CURSOR = struct.Struct(">Q8s")
_TYPES: dict[int, FileType] = {
    FileKind.REG: FileType.FILE,
    FileKind.DIR: FileType.DIRECTORY,
    FileKind.LNK: FileType.SYMLINK,
    FileKind.FIFO: FileType.FIFO,
    FileKind.SOCK: FileType.SOCKET,
    FileKind.CHR: FileType.CHARACTER,
    FileKind.BLK: FileType.BLOCK,
}
# Statuses of READ that GETATTR explains: no right to read, or not a file at all.
_ODD = (Status.ACCES, Status.PERM, Status.INVAL, Status.ISDIR)
_GONE = (StaleHandle, NotFound, NotADirectory)


class NfsBackend:
    """One NFSv3 export, or a directory in one. Options: timeout (seconds), connections, identity
    ("owner", "caller", "UID:GID"), port, mountport. Raises UsageError, ConfigError."""

    def __init__(self, *, device: DeviceId, url: str, options: Options) -> None:
        settings = parse_settings(url, options)
        self._device = device
        self._url = settings.url
        self._timeout_s = settings.timeout_s
        self._identity = Identity(settings.identity)
        self._session = Session(settings, self._identity)
        self._link = Link(self._session, trio.CapacityLimiter(_MOUNT_THREADS))
        self._lanes = Lanes(self._session)
        self._clock = ServerClock()
        self._plus = True
        self._caps = Capabilities(
            flat=False,
            ordered=False,
            strong_versions=False,
            has_handles=True,
            pinned_reads=True,
            concurrency=settings.connections,
            read_max=_READ_MAX,
        )

    @property
    def device(self) -> DeviceId:
        return self._device

    @property
    def caps(self) -> Capabilities:
        return self._caps

    async def stat(self, place: Place) -> ObjectStat:
        found = await self._find(place)
        target = b""
        if found.attributes.kind == FileKind.LNK:
            target = await self._run(nfs_requests.readlink(self._identity, found.handle))
        return self._describe(place.key, found.handle, found.attributes, target)

    async def scan(self, directory: Place, *, after: Cursor | None = None) -> AsyncIterator[Page]:
        handle = directory.handle
        if not handle:
            handle = (await self._find(directory)).handle
        cookie, verifier = _unpack_cursor(after)
        while True:
            try:
                page = await self._page(handle, cookie, verifier)
            except StaleHandle:
                # Only a listing from its start may go on in another directory of the same name.
                found = await self._find(Place(directory.key))
                if found.handle == handle or cookie:
                    raise
                handle = found.handle
                continue
            entries = [e for e in page.entries if e.name not in (b".", b"..")]
            described = await self._complete(directory.key, handle, entries)
            if page.eof:
                yield Page(tuple(described))
                return
            if not page.entries or page.entries[-1].cookie == cookie:
                raise ProtocolError(self._url, "a listing that does not advance")
            cookie, verifier = page.entries[-1].cookie, page.verifier
            yield Page(tuple(described), _CURSOR.pack(cookie, verifier))

    async def probe(self) -> Space:
        export = await self._link.export()
        space = await self._run(nfs_requests.fsstat(self._identity, export.root))
        return Space(space.total, space.free, space.available, space.files, space.files_free)

    async def aclose(self) -> None:
        self._session.close()
        self._link.close()
        self._lanes.close()
        await trio.lowlevel.checkpoint()

    # Metadata.

    async def _run(self, steps: Steps[T]) -> T:
        (result,) = await self._run_all([steps])
        if isinstance(result, HsfsError):
            raise result
        return result

    async def _run_all(self, operations: Sequence[Steps[T]]) -> list[T | HsfsError]:
        """Drive operations together: their current calls travel as one pipelined batch. An error
        stands in its operation's place."""
        results: list[T | HsfsError | None] = [None] * len(operations)
        asking: dict[int, Request] = {}

        def advance(index: int, answer: Answer | None) -> None:
            try:
                steps = operations[index]
                asking[index] = next(steps) if answer is None else steps.send(answer)
            except StopIteration as done:
                results[index] = done.value
            except HsfsError as error:
                results[index] = error

        for index in range(len(operations)):
            advance(index, None)
        started, backoff_s = trio.current_time(), _BACKOFF_S
        while asking:
            indexes = list(asking)
            answers = await self._link.ask([asking[i] for i in indexes])
            busy = False
            for index, answer in zip(indexes, answers, strict=True):
                if isinstance(answer, HsfsError):
                    results[index] = answer
                    del asking[index]
                elif answer.status == Status.JUKEBOX:
                    busy = True  # the server fetches it from slow storage: ask again
                else:
                    del asking[index]
                    advance(index, answer)
            if not busy:
                started, backoff_s = trio.current_time(), _BACKOFF_S
                continue
            if trio.current_time() - started > self._timeout_s:
                raise Throttled(self._url, "the server keeps asking for patience (JUKEBOX)")
            await trio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
        return [r for r in results if r is not None]

    async def _find(self, place: Place) -> Resolved:
        """What the place's handle names, else what its key names now."""
        export = await self._link.export()
        if place.handle:
            try:
                attributes = await self._run(nfs_requests.getattr_(self._identity, place.handle))
                if attributes.nlink:
                    return Resolved(place.handle, attributes)
            except StaleHandle:
                pass
        try:
            return await self._run(nfs_requests.walk(self._identity, export.root, place.key))
        except StaleHandle:
            self._session.forget(export)
            export = await self._link.export()
            return await self._run(nfs_requests.walk(self._identity, export.root, place.key))

    async def _page(self, handle: bytes, cookie: int, verifier: bytes) -> DirectoryPage:
        size = (await self._link.export()).page
        read = nfs_requests.read_directory
        if self._plus:
            try:
                return await self._run(read(self._identity, handle, cookie, verifier, size, True))
            except NotSupported:
                if cookie:
                    raise
                self._plus = False
        return await self._run(read(self._identity, handle, cookie, verifier, size, False))

    async def _complete(
        self, key: bytes, directory: bytes, entries: Sequence[DirectoryEntry]
    ) -> list[ObjectStat]:
        """Entries as stats; what the listing left out (attributes, handles, link targets) is asked
        for, pipelined. A name that has gone meanwhile is left out."""
        found: dict[bytes, Resolved] = {}
        missing: list[bytes] = []
        for entry in entries:
            if b"/" in entry.name or b"\0" in entry.name or not entry.name:
                raise ProtocolError(self._url, "a name that no file can have")
            if entry.attributes is None or not entry.handle:
                missing.append(entry.name)
            else:
                found[entry.name] = Resolved(entry.handle, entry.attributes)
        looked_up = await self._run_all(
            [nfs_requests.lookup(self._identity, directory, name) for name in missing]
        )
        for name, result in zip(missing, looked_up, strict=True):
            if isinstance(result, HsfsError):
                if not isinstance(result, _GONE):
                    raise result
                continue
            found[name] = result
        links = [n for n, r in found.items() if r.attributes.kind == FileKind.LNK]
        targets = await self._run_all(
            [nfs_requests.readlink(self._identity, found[name].handle) for name in links]
        )
        target_of: dict[bytes, bytes] = {}
        for name, target in zip(links, targets, strict=True):
            if isinstance(target, HsfsError):
                if not isinstance(target, _GONE):
                    raise target
                del found[name]
                continue
            target_of[name] = target
        self._clock.observe(max((r.attributes.ctime_ns for r in found.values()), default=0))
        prefix = key + b"/" if key else b""
        return [
            self._describe(prefix + e.name, r.handle, r.attributes, target_of.get(e.name, b""))
            for e in entries
            if (r := found.get(e.name)) is not None
        ]

    def _describe(
        self, key: bytes, handle: bytes, attributes: Attributes, target: bytes
    ) -> ObjectStat:
        a = attributes
        kind = _TYPES.get(a.kind)
        if kind is None:
            raise ProtocolError(self._url, f"file type {a.kind}")
        file = kind is FileType.FILE
        device = kind in (FileType.CHARACTER, FileType.BLOCK)
        return ObjectStat(
            name=key.rpartition(b"/")[2],
            type=kind,
            place=Place(key, handle),
            size=a.size,
            mtime_ns=a.mtime_ns,
            ctime_ns=a.ctime_ns,
            version=pack_version(a.fileid, a.size, a.mtime_ns, a.ctime_ns) if file else b"",
            identity=pack_identity(a.fsid, a.fileid),
            mode=a.mode & 0o7777,
            uid=a.uid,
            gid=a.gid,
            nlink=a.nlink,
            target=target,
            rdev=os.makedev(a.rdev_major, a.rdev_minor) if device else 0,
            strong=self._clock.settled(a.ctime_ns) if file else True,
        )

    # Bytes: from here on in worker threads.

    def read_into(
        self,
        place: Place,
        offset: int,
        buf: memoryview,
        /,
        *,
        expect: Version | None,
        interrupt: Interrupt,
    ) -> int:
        pin = None
        length = len(buf)
        if expect is not None:
            pin = unpack_version(expect)
            length = max(0, min(length, pin.size - offset))
        if self._lanes.closed:
            raise Unavailable(self._url, "closed")
        if length == 0:
            return 0
        job = ReadJob(offset, buf[:length], pin, self._timeout_s)
        interrupt.attach(job.stop)
        try:
            return self._read(place, job)
        finally:
            interrupt.detach()

    def _read(self, place: Place, job: ReadJob) -> int:
        handle = place.handle
        looked_up = False
        backoff_s = _BACKOFF_S
        while True:
            fresh = True
            try:
                with self._lanes.lane(job) as lane:
                    fresh = lane.fresh
                    if not handle:
                        handle = self._resolve(lane, place.key, job)
                        looked_up = True
                    status = self._read_as_owner(lane, handle, job)
                if status == Status.OK:
                    return job.end
                if status in (Status.STALE, Status.BADHANDLE) and not looked_up:
                    handle = b""
                    continue
                if status != Status.JUKEBOX:
                    check(status, "file")
                trouble: HsfsError = Throttled(self._url, "the server asks for patience (JUKEBOX)")
            except ConnectionLost as error:
                if job.stopped:
                    raise Interrupted("read", "the caller has gone away") from error
                if self._lanes.closed:
                    raise Unavailable(self._url, "closed") from error
                if not self._session.known:
                    raise
                trouble = error
                if not fresh:
                    continue  # servers close what was idle for long: nothing to wait for
            if job.overdue:
                raise trouble
            job.pause(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    def _read_as_owner(self, lane: Lane, handle: bytes, job: ReadJob) -> int:
        """nfsstat3 of the job; refused reads are tried again as the file's owner."""
        credentials = self._identity.credentials(handle)
        status = lane.read(handle, credentials, job)
        if status not in _ODD:
            return status
        answer = lane.wire.ask(Request(GETATTR, handle_arguments(handle), credentials))
        if answer.status != Status.OK:
            return answer.status
        attributes = parse_getattr(answer.record, answer.position)
        job.agree(attributes)
        if attributes.kind == FileKind.DIR:
            raise IsADirectory("file")
        if attributes.kind != FileKind.REG:
            raise NotSupported("file", "not a regular file")
        owner = self._identity.as_owner(attributes, credentials)
        if owner is None or status == Status.INVAL:
            return status
        again = lane.read(handle, owner, job)
        if again == Status.OK:
            self._identity.learn(handle, owner)
        return again

    def _resolve(self, lane: Lane, key: bytes, job: ReadJob) -> bytes:
        """The handle of what the key names now; for a pinned read it has to be the same file."""
        try:
            found = lane.wire.run(nfs_requests.walk(self._identity, lane.export.root, key))
        except _GONE as error:
            if isinstance(error, StaleHandle):
                self._session.forget(lane.export)
            if job.exact:
                raise StaleVersion("file", "gone from its backend") from error
            raise
        job.agree(found.attributes)
        return found.handle


def _unpack_cursor(cursor: Cursor | None) -> tuple[int, bytes]:
    if not cursor:
        return 0, bytes(8)
    if len(cursor) != _CURSOR.size:
        raise ProtocolError("cursor", "not one of this backend")
    cookie, verifier = _CURSOR.unpack(cursor)
    return cookie, verifier


async def open_nfs(device: DeviceId, url: str, options: Options) -> NfsBackend:
    """The backend of an `nfs://HOST[:PORT]/EXPORT/PATH` URL; connects at its first use."""
    return NfsBackend(device=device, url=url, options=options)
