"""Bulk reads: a pool of dedicated blocking connections ("lanes") for worker threads.

One read sends its READ calls together and receives each reply's head, then the data straight into
the caller's buffer: one system call per MiB, without the interpreter's lock. The head carries the
file's attributes, so every reply is checked against the expected version before its bytes count.

A lane is owned by one read at a time. After anything unexpected it is closed: a stream whose state
is in doubt is never used again. A read that loses its lane goes on with what is missing on a fresh
one until the backend's timeout has passed without a byte.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hsfs.backends.filestat import FileVersionFields
from hsfs.backends.nfs_requests import Request, check, check_reply
from hsfs.backends.nfs_session import Export, Session
from hsfs.backends.nfs_wire import Wire, next_xid
from hsfs.core.errors import (
    HsfsError,
    Interrupted,
    ProtocolError,
    StaleVersion,
    TimedOut,
    Unavailable,
)
from hsfs.proto import nfs3, rpc
from hsfs.proto.nfs3 import Attributes, ReadHead

_WINDOW = 8  # READ calls in flight on one lane
_HEAD = 4 + nfs3.READ_HEAD_SIZE  # record mark and the usual head
_POLL_S = 0.2


def fields_of(attributes: Attributes) -> FileVersionFields:
    """The fields that make a version."""
    return FileVersionFields(
        attributes.fileid, attributes.size, attributes.mtime_ns, attributes.ctime_ns
    )


class ReadJob:
    """One read_into on its way: what is still missing, the pinned version, the deadline.

    `pin` None = whatever the first reply shows; the rest then has to agree with it. Offsets in
    `todo` are relative to `buf`.
    """

    def __init__(
        self,
        offset: int,
        buf: memoryview,
        pin: FileVersionFields | None,
        timeout_s: float,
    ) -> None:
        self.offset = offset
        self.buf = buf
        self.exact = pin is not None
        self.pin = pin
        self.end = len(buf)
        self.todo: list[tuple[int, int]] = [(0, len(buf))]
        self.timeout_s = timeout_s
        self._touched_s = time.monotonic()
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._stopped = threading.Event()

    def progress(self) -> None:
        """Bytes came: the deadline starts again."""
        self._touched_s = time.monotonic()

    @property
    def overdue(self) -> bool:
        """The timeout has passed without progress."""
        return time.monotonic() - self._touched_s > self.timeout_s

    def stop(self) -> None:
        """The caller has gone away: end whatever blocks. From any thread."""
        self._stopped.set()
        self.cut()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, or less when stopped."""
        self._stopped.wait(seconds)

    def hold(self, wire: Wire) -> None:
        """This wire is what `stop` has to end. Raises Interrupted."""
        with self._lock:
            self._wire = wire
        if self.stopped:
            raise Interrupted("read", "the caller has gone away")

    def release(self) -> None:
        """No wire is in use any more."""
        with self._lock:
            self._wire = None

    def cut(self) -> None:
        """End what blocks now, without the caller having gone away."""
        with self._lock:
            if self._wire is not None:
                self._wire.stop()

    def agree(self, attributes: Attributes) -> None:
        """Raises StaleVersion unless the file is still what is being read."""
        seen = fields_of(attributes)
        if self.pin is None:
            self.pin = seen
        elif seen != self.pin:
            raise StaleVersion("file", "changed on its backend")


class Lane:
    """One connection of the pool."""

    def __init__(self, export: Export, timeout_s: float) -> None:
        self.export = export
        self.wire = Wire(export.address, timeout_s)
        self._head = memoryview(bytearray(_HEAD))
        self.fresh = True  # no read has gone over it yet
        self._spare = b""  # bytes of the next record that came with a short one

    def _some(self, view: memoryview) -> int:
        if self._spare:
            n = min(len(self._spare), len(view))
            view[:n] = self._spare[:n]
            self._spare = self._spare[n:]
            return n
        return self.wire.receive_some(view)

    def _exactly(self, view: memoryview) -> None:
        while self._spare and len(view):
            view = view[self._some(view) :]
        if len(view):
            self.wire.receive_exactly(view)

    def read(self, handle: bytes, credentials: bytes, job: ReadJob) -> int:
        """Do what is left of the job; nfsstat3 of the reply that stopped it, or 0."""
        size = self.export.read_max
        flying: dict[int, tuple[int, int]] = {}
        unproven = False
        refused = 0
        while flying or (job.todo and not refused):
            calls = []
            while job.todo and not refused and len(flying) < _WINDOW:
                start, end = job.todo.pop()
                if end - start > size:
                    job.todo.append((start + size, end))
                    end = start + size
                xid = next_xid()
                flying[xid] = (start, end)
                arguments = nfs3.read_arguments(handle, job.offset + start, end - start)
                calls.append(
                    rpc.call(xid, rpc.PROGRAM_NFS, nfs3.VERSION, nfs3.READ, credentials, arguments)
                )
            try:
                if calls:
                    self.wire.send(b"".join(calls) if len(calls) > 1 else calls[0])
                status, proven = self._reply(flying, job)
            except HsfsError:
                job.todo.extend(flying.values())
                raise
            unproven |= not proven
            # The replies to the other calls are still on their way: take them all in.
            refused = refused or status
        if refused:
            return refused
        self.fresh = False
        if unproven:
            # The server leaves attributes out of its READ replies: ask once, after the data.
            if self._spare:
                raise ProtocolError(self.wire.where, "bytes behind the last reply")
            about = self.wire.ask(Request(nfs3.GETATTR, nfs3.handle_arguments(handle), credentials))
            check(about.status, "file")
            job.agree(nfs3.parse_getattr(about.record, about.position))
        return 0

    def _reply(self, flying: dict[int, tuple[int, int]], job: ReadJob) -> tuple[int, bool]:
        """One reply: its data into the buffer. (nfsstat3, whether its attributes proved it.)"""
        view = self._head
        n = self._some(view)
        while n < 4:
            n += self._some(view[n:])
        length, last = rpc.record_mark(view)
        if length > rpc.RECORD_MAX:
            raise ProtocolError(self.wire.where, f"a record of {length} bytes")
        want = min(_HEAD, 4 + length)
        while n < want:
            n += self._some(view[n:])
        if not last:
            return self._fragmented(flying, job, n, length)
        head = nfs3.parse_read_head(view[4:want])
        if head is None or head.status:
            record = bytearray(length)
            record[: want - 4] = view[4:want]
            self._spare = bytes(view[want:n]) + self._spare
            self._exactly(memoryview(record)[want - 4 :])
            return self._whole(record, flying, job)
        target, proven = self._begin(head, flying, job)
        padding = length - head.data - head.count
        if not 0 <= padding <= 3:
            raise ProtocolError(self.wire.where, f"READ: {padding} bytes behind the data")
        have = view[4 + head.data : n]
        took = min(len(have), head.count)
        target[:took] = have[:took]
        if len(have) > took:
            self._spare = bytes(have[took:]) + self._spare
        if took < head.count:
            self._exactly(target[took:])
        if padding:
            self._exactly(memoryview(bytearray(padding)))
        self._finish(head, flying, job)
        return 0, proven

    def _fragmented(
        self, flying: dict[int, tuple[int, int]], job: ReadJob, n: int, length: int
    ) -> tuple[int, bool]:
        """A record in several fragments: put together, then copied."""
        self._spare = bytes(self._head[4:n]) + self._spare
        record = bytearray()
        last = False
        mark = memoryview(bytearray(4))
        while True:
            fragment = bytearray(length)
            self._exactly(memoryview(fragment))
            record += fragment
            if last:
                return self._whole(record, flying, job)
            self._exactly(mark)
            length, last = rpc.record_mark(mark)
            if len(record) + length > rpc.RECORD_MAX:
                raise ProtocolError(self.wire.where, "a record without end")

    def _whole(
        self, record: bytearray, flying: dict[int, tuple[int, int]], job: ReadJob
    ) -> tuple[int, bool]:
        """A record that is all here: an unusual reply, or a refusal."""
        head = nfs3.parse_read_head(record)
        if head is None:
            reply = rpc.parse_reply(record)
            check_reply(reply, self.wire.where)
            raise ProtocolError(self.wire.where, "a READ reply that ends in its head")
        if head.status:
            if head.xid not in flying:
                raise ProtocolError(self.wire.where, "a reply to no call of ours")
            job.todo.append(flying.pop(head.xid))
            return head.status, True
        target, proven = self._begin(head, flying, job)
        if len(record) - head.data < head.count:
            raise ProtocolError(self.wire.where, "READ data that end early")
        target[:] = record[head.data : head.data + head.count]
        self._finish(head, flying, job)
        return 0, proven

    def _begin(
        self, head: ReadHead, flying: dict[int, tuple[int, int]], job: ReadJob
    ) -> tuple[memoryview, bool]:
        """Where the data go, once the reply is known to be about the right version."""
        piece = flying.get(head.xid)
        if piece is None:
            raise ProtocolError(self.wire.where, "a reply to no call of ours")
        start, end = piece
        if head.count > end - start:
            raise ProtocolError(self.wire.where, f"READ: {head.count} bytes, asked {end - start}")
        if head.attributes is not None:
            job.agree(head.attributes)
        return job.buf[start : start + head.count], head.attributes is not None

    def _finish(self, head: ReadHead, flying: dict[int, tuple[int, int]], job: ReadJob) -> None:
        start, end = flying.pop(head.xid)
        job.progress()
        reached = start + head.count
        if reached == end:
            return
        if head.eof:
            if job.exact:
                raise StaleVersion("file", "ends earlier than its version")
            job.end = min(job.end, reached)
        elif head.count == 0:
            raise Unavailable(self.wire.where, "READ gives no bytes before the end of the file")
        else:
            job.todo.append((reached, end))

    def close(self) -> None:
        """Idempotent."""
        self.wire.close()

    @property
    def closed(self) -> bool:
        """Whether it may not be used again."""
        return self.wire.sock.fileno() < 0


class Lanes:
    """At most `connections` lanes, opened when needed. Thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._limit = session.settings.connections
        self._timeout_s = session.settings.timeout_s
        self._changed = threading.Condition()
        self._idle: list[Lane] = []
        self._busy: dict[Lane, ReadJob] = {}
        self._connecting = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @contextmanager
    def lane(self, job: ReadJob) -> Iterator[Lane]:
        """A connected lane for one attempt; it is closed afterwards if the attempt raised."""
        lane = self._take(job)
        try:
            job.hold(lane.wire)
            yield lane
        except BaseException:
            lane.close()
            raise
        finally:
            job.release()
            with self._changed:
                del self._busy[lane]
                if not lane.closed and not self._closed:
                    self._idle.append(lane)
                else:
                    lane.close()
                self._changed.notify()

    def _take(self, job: ReadJob) -> Lane:
        with self._changed:
            while True:
                self._check(job)
                current = self._session.current
                while self._idle:
                    lane = self._idle.pop()
                    if lane.export is current:
                        self._busy[lane] = job
                        return lane
                    lane.close()  # its server moved, or its root went stale
                if len(self._busy) + self._connecting < self._limit:
                    self._connecting += 1
                    break
                self._changed.wait(_POLL_S)
                if job.overdue and all(other.overdue for other in self._busy.values()):
                    raise TimedOut(self._session.settings.url, "all connections are stuck")
        made: Lane | None = None
        try:
            made = self._connect(job)
        finally:
            with self._changed:
                self._connecting -= 1
                if made is not None:
                    self._busy[made] = job
                self._changed.notify()
        return made

    def _check(self, job: ReadJob) -> None:
        if self._closed:
            raise Unavailable(self._session.settings.url, "closed")
        if job.stopped:
            raise Interrupted("read", "the caller has gone away")

    def _connect(self, job: ReadJob) -> Lane:
        export = self._session.export(job)
        lane = Lane(export, self._timeout_s)
        try:
            job.hold(lane.wire)
            lane.wire.connect()
        except BaseException:
            lane.close()
            if self._session.settings.port is None:
                self._session.forget(export)  # a restarted server may listen elsewhere
            raise
        finally:
            job.release()
        return lane

    def close(self) -> None:
        """Close idle lanes and end the reads on the others."""
        with self._changed:
            self._closed = True
            for lane in self._idle:
                lane.close()
            self._idle.clear()
            jobs = list(self._busy.values())
            self._changed.notify_all()
        for job in jobs:
            job.cut()
