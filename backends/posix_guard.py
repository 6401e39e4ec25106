"""Keeps a hanging file system below us from hanging us.

A system call on a kernel mount whose server is gone can block for ever and can't be cancelled. Such
calls are made in threads that may be left behind: the waiter gives up after its deadline, the
thread ends whenever the kernel lets it. So that nothing is written into a buffer that its owner
took back, guarded reads go through a buffer of their own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from hsfs.core.errors import Interrupted, TimedOut
from hsfs.core.ports import Interrupt

T = TypeVar("T")

STUCK_MAX = 32
_IDLE_S = 10.0

# File systems whose calls end by themselves; all others may depend on a server or a daemon.
# fmt: off
_LOCAL = frozenset({
    "bcachefs", "btrfs", "cramfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "hfsplus",
    "iso9660", "jfs", "msdos", "nilfs2", "ntfs3", "overlay", "ramfs", "reiserfs", "rootfs",
    "squashfs", "tmpfs", "ubifs", "udf", "vfat", "xfs", "zfs",
})
# fmt: on


def may_hang(path: bytes) -> bool:
    """Whether the mount that holds `path` (absolute), or one below it, may depend on a server.

    Read from the kernel's list: the path itself is not touched, so this can't hang. Symbolic links
    in the path are not followed.
    """
    path = path.rstrip(b"/") or b"/"
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return True
    best, best_local = b"", False
    for line in lines:
        front, _, back = line.partition(b" - ")
        mountpoint = _unescape(front.split(b" ")[4])
        local = back.split(b" ")[0].decode() in _LOCAL
        prefix = mountpoint.rstrip(b"/") + b"/"
        if (path + b"/").startswith(prefix):
            if len(prefix) >= len(best):  # a later mount on the same place hides the earlier one
                best, best_local = prefix, local
        elif not local and mountpoint.startswith(path.rstrip(b"/") + b"/") and path != b"/":
            return True
    return not best_local


def _unescape(text: bytes) -> bytes:
    for code in (b"040", b"011", b"012", b"134"):
        text = text.replace(b"\\" + code, bytes([int(code, 8)]))
    return text


class _Task(Generic[T]):
    """One guarded call and its result."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.changed = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None
        self.done = False

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # handed to the waiter, whatever it is
            self.error = error
        self.done = True
        self.changed.set()


class Guard:
    """Runs blocking calls in daemon threads, which are used again while they come back."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Task[object] | None] = queue.SimpleQueue()
        self._idle = 0
        self._running = 0

    def run(self, work: Callable[[], T], timeout_s: float, interrupt: Interrupt) -> T:
        """The call's result. Raises TimedOut, Interrupted (the call goes on, unheard) and what
        `work` raises."""
        task = _Task(work)
        self._start(task)
        interrupt.attach(task.changed.set)
        try:
            task.changed.wait(timeout_s)
        finally:
            interrupt.detach()
        if task.error is not None:
            raise task.error
        if task.done:
            return task.result  # type: ignore[return-value]
        if interrupt.interrupted:
            raise Interrupted(self._what, "the caller has gone away")
        raise TimedOut(self._what, f"the file system does not answer for {timeout_s:g} s")

    def _start(self, task: _Task[T]) -> None:
        with self._lock:
            fresh = self._idle == 0
            if fresh:
                if self._running >= STUCK_MAX:
                    raise TimedOut(self._what, f"{STUCK_MAX} calls hang in the file system")
                self._running += 1
            else:
                self._idle -= 1
        self._queue.put(task)  # type: ignore[arg-type]
        if fresh:
            threading.Thread(target=self._serve, name="hsfs-guard", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                task = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    # A task may have been promised to this thread just now.
                    if self._idle == 0:
                        continue
                    self._idle -= 1
                    self._running -= 1
                return
            if task is not None:
                task.run()
            del task
            with self._lock:
                self._idle += 1
