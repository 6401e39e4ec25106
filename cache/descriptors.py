"""A bounded number of open cache files, shared by all that are pinned.

A pinned file usually keeps its descriptor; when the limit is reached the one used longest ago is
closed and opened again at its next use. A few unpinned ones stay open for the next open of the same
file. A descriptor is never closed while a thread uses it (`users`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict
from threading import Condition, Lock
from typing import Protocol

from hsfs.core.errors import CacheUnavailable

IDLE_MAX = 64
WAIT_S = 30.0


class Holder(Protocol):
    """What has a descriptor. `fd` and `users` are guarded by the table's lock."""

    fd: int
    users: int
    opening: Lock

    def open_fd(self) -> int:
        """Open the file. Raises HsfsError."""


class Descriptors:
    """The table. Its lock is a leaf: nothing else is taken, and no I/O done, under it."""

    def __init__(self, limit: int) -> None:
        self._limit = max(4, limit)
        self._idle_max = min(IDLE_MAX, self._limit // 2)
        self._lock = Lock()
        self._freed = Condition(self._lock)
        self._waiting = 0
        self._opening = 0
        self._closed: list[Holder] = []  # unpinned ones that lost their descriptor
        self._busy: OrderedDict[int, Holder] = OrderedDict()  # pinned, oldest first
        self._idle: OrderedDict[int, Holder] = OrderedDict()  # unpinned, oldest first

    def __len__(self) -> int:
        return len(self._busy) + len(self._idle)

    def acquire(self, holder: Holder, *, wait: bool = True) -> int:
        """The holder's descriptor, not to be closed before `release`; -1 when that would mean to
        wait and `wait` is false. Raises what `open_fd` raises, CacheUnavailable (all in use).
        """
        with self._lock:
            if holder.fd >= 0:
                holder.users += 1
                return holder.fd
        if not holder.opening.acquire(blocking=wait):
            return -1
        try:
            with self._lock:
                if holder.fd >= 0:
                    holder.users += 1
                    return holder.fd
            if not self._make_room(wait):
                return -1
            fd = -1
            try:
                fd = holder.open_fd()
            finally:
                with self._lock:
                    self._opening -= 1
                    if fd >= 0:
                        holder.fd = fd
                        holder.users += 1
                        self._busy[id(holder)] = holder
                    if self._waiting:
                        self._freed.notify_all()
            return fd
        finally:
            holder.opening.release()

    def release(self, holder: Holder) -> None:
        """The use that `acquire` began is over."""
        with self._lock:
            holder.users -= 1
            if self._waiting and not holder.users:
                self._freed.notify_all()

    def pin(self, holder: Holder) -> None:
        """The holder is in use: its descriptor goes after those of all unpinned ones."""
        with self._lock:
            if self._idle.pop(id(holder), None) is not None:
                self._busy[id(holder)] = holder

    def idle(self, holder: Holder) -> list[Holder]:
        """The holder is unpinned; its descriptor stays open for a while. Gives the holders, this
        one included, that were unpinned when they lost theirs since the last call."""
        doomed = -1
        with self._lock:
            if self._busy.pop(id(holder), None) is None:
                if holder.fd < 0:
                    self._closed.append(holder)
            else:
                self._idle[id(holder)] = holder
                if len(self._idle) > self._idle_max:
                    doomed = self._take_idle()
            closed = self._closed
            if closed:
                self._closed = []
        _close(doomed)
        return closed

    def drop(self, holder: Holder, wait_s: float = WAIT_S) -> None:
        """Close the holder's descriptor for good, once its last user is through; one that is not
        through in time keeps it."""
        deadline = time.monotonic() + wait_s
        with self._lock:
            while holder.users:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._waiting += 1
                try:
                    self._freed.wait(left)
                finally:
                    self._waiting -= 1
            self._busy.pop(id(holder), None)
            self._idle.pop(id(holder), None)
            fd, holder.fd = holder.fd, -1
            if self._waiting:
                self._freed.notify_all()
        _close(fd)

    def _make_room(self, wait: bool) -> bool:
        """Count one more descriptor as being opened, closing another if there has to be."""
        deadline = time.monotonic() + WAIT_S
        while True:
            with self._lock:
                if len(self) + self._opening < self._limit:
                    self._opening += 1
                    return True
                doomed = self._take_idle()
                if doomed < 0:
                    doomed = self._take_busy()
                if doomed < 0:
                    if not wait:
                        return False
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise CacheUnavailable("cache", "all its file descriptors are in use")
                    self._waiting += 1
                    try:
                        self._freed.wait(left)
                    finally:
                        self._waiting -= 1
            _close(doomed)

    def _take_idle(self) -> int:
        for name, holder in self._idle.items():
            if not holder.users:
                del self._idle[name]
                self._closed.append(holder)
                fd, holder.fd = holder.fd, -1
                return fd
        return -1

    def _take_busy(self) -> int:
        for name, holder in self._busy.items():
            if not holder.users:
                del self._busy[name]
                fd, holder.fd = holder.fd, -1
                return fd
        return -1


def _close(fd: int) -> None:
    if fd >= 0:
        with contextlib.suppress(OSError):
            os.close(fd)
