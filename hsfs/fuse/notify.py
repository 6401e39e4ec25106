"""Tells the kernel what changed, from OS threads of its own.

A notification may block in the kernel until a request about the same inode has been answered, so it
is never made by a handler, by the event loop or under a lock of ours. Threads are keyed by inode:
one that is stuck holds up its own inodes only. The queues are bounded and merge repeats; what falls
out of them is caught by the kernel's own timeouts, which never exceed what we promised.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_THREADS = 2
_QUEUE_MAX = 65536
# The kernel does not know the inode or name, or the mount is going away.
_EXPECTED = {errno.ENOENT, errno.ENOTCONN, errno.ENODEV, errno.EBADF, errno.ENOTDIR}


class _Worker:
    def __init__(self, number: int, tell: Callable[[int, bytes], None]) -> None:
        self._tell = tell
        self._condition = threading.Condition()
        self._queue: dict[tuple[int, bytes], None] = {}
        self._closed = False
        self.dropped = 0
        self.thread = threading.Thread(target=self._run, name=f"hsfs-notify-{number}", daemon=True)

    def put(self, ino: int, name: bytes) -> None:
        with self._condition:
            if len(self._queue) >= _QUEUE_MAX:
                del self._queue[next(iter(self._queue))]
                self.dropped += 1
            self._queue[ino, name] = None
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._queue.clear()
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._queue:
                    if self._closed:
                        return
                    self._condition.wait()
                ino, name = next(iter(self._queue))
                del self._queue[ino, name]
            try:
                self._tell(ino, name)
            except OSError as error:
                if error.errno not in _EXPECTED:
                    log.warning("telling the kernel of a change failed: %s", error)
            except Exception:
                log.exception("telling the kernel of a change failed")


class Notifier:
    """`tell(ino, name)` makes one notification (name b"": the inode's attributes); it may block and
    raise OSError."""

    def __init__(self, tell: Callable[[int, bytes], None]) -> None:
        self._workers = [_Worker(number, tell) for number in range(_THREADS)]
        for worker in self._workers:
            worker.thread.start()

    def put(self, ino: int, name: bytes) -> None:
        """Queue one; never blocks; any thread."""
        self._workers[ino % _THREADS].put(ino, name)

    def close(self, timeout_s: float) -> bool:
        """Forget what is queued; whether all threads have ended."""
        until = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.thread.join(max(0.0, until - time.monotonic()))
        return not any(worker.thread.is_alive() for worker in self._workers)
