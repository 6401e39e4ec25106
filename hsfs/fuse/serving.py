"""Drives pyfuse3's request loop from one OS thread; whichever thread has the answer replies.

pyfuse3's own `main` gives every request a trip through the event loop: a lock, epoll, a task
switch, and the loop's own thread hop for anything that blocks. Most requests of a file system that
knows its answers need none of that. Here its session loop is a coroutine like any other, driven by
hand:

- this module's thread waits in poll(2) with the GIL released and sends an idle loop coroutine into
  the next request; a handler that returns without waiting has answered before `send` comes back;
- a handler that has to wait awaits `suspended(register)`. The coroutine then belongs to whoever
  calls the `Resume` that `register` is given: the worker thread that fetched the bytes, or the
  event loop. It is resumed right there, which sends the reply without a further hop;
- afterwards the coroutine waits for the next request again and goes back to the idle ones.

The device is non-blocking: pyfuse3 reads it with the GIL held, and a request that is withdrawn
between poll and read would stop the whole process. libfuse reports that as EAGAIN, which costs the
coroutine (and its buffer), nothing else.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

log = logging.getLogger(__name__)

Register = Callable[["Resume"], None]
Loop = Coroutine[object, object, None]

REQUESTS_MAX = 2048
IDLE_MAX = 32
READY = object()


@types.coroutine
def next_request() -> Generator[object, bool, bool]:
    """Awaited by the session loop: whether there is a request to receive (false: end)."""
    return (yield READY)


@types.coroutine
def suspended(register: Register) -> Generator[Register, Any, Any]:
    """Awaited by a handler that can't answer yet; gives what the `Resume` is called with, raises
    it when it is an exception."""
    outcome = yield register
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


class Resume:
    """Continues one suspended handler, once, from any thread."""

    __slots__ = ("_loop", "_serving")

    def __init__(self, serving: Serving, loop: Loop) -> None:
        self._serving = serving
        self._loop: Loop | None = loop

    def __call__(self, outcome: object) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            self._serving.resume(loop, outcome)


class Latch:
    """Joins a callback that may come at any time with the `Resume` of the handler that waits."""

    __slots__ = ("_lock", "_outcome", "_resume")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome: object = None
        self._resume: Resume | None = None

    def __call__(self, outcome: object) -> None:
        with self._lock:
            resume = self._resume
            if resume is None:
                # A view is valid during this call only.
                self._outcome = bytes(outcome) if isinstance(outcome, memoryview) else outcome
        if resume is not None:
            resume(outcome)

    def attach(self, resume: Resume) -> None:
        """The `register` of `suspended`."""
        with self._lock:
            outcome = self._outcome
            if outcome is None:
                self._resume = resume
        if outcome is not None:
            resume(outcome)


class Serving:
    """One session on the device `fd`; `make` gives a new session loop, `ended` is called from the
    thread when the kernel or `close` ended it."""

    def __init__(self, fd: int, make: Callable[[], Loop], ended: Callable[[], None]) -> None:
        self._fd = fd
        self._make = make
        self._ended = ended
        self._idle: list[Loop] = []
        self._live = 0
        self._over = False
        self._closed = False
        self._resuming = 0
        self._gate = threading.Condition(threading.Lock())
        self.begun = threading.Event()  # the first request, INIT, was answered
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="hsfs-fuse", daemon=True)
        os.set_blocking(fd, False)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Requests that wait for something."""
        return self._live - len(self._idle)

    def resume(self, loop: Loop, outcome: object) -> None:
        """Continue a suspended handler; nothing happens once `close` began."""
        with self._gate:
            if self._closed:
                return
            self._resuming += 1
        try:
            self._drive(loop, outcome)
        finally:
            with self._gate:
                self._resuming -= 1
                if self._closed:
                    self._gate.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Stop answering. True when no thread is inside the session any more, so that it may be
        destroyed; handlers that still wait are dropped."""
        until = time.monotonic() + timeout_s
        with self._gate:
            self._closed = True
        os.write(self._wake_write, b"x")
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        with self._gate:
            while self._resuming:
                left = until - time.monotonic()
                if left <= 0 or not self._gate.wait(left):
                    break
            quiet = not self._resuming and not self._thread.is_alive()
        if quiet:
            self._drop_idle()
            os.close(self._wake_read)
            os.close(self._wake_write)
        return quiet

    def _drop_idle(self) -> None:
        # Ending them, instead of dropping them, frees libfuse's buffers.
        idle, self._idle = self._idle, []
        for loop in idle:
            self._end(loop)

    @staticmethod
    def _end(loop: Loop) -> None:
        try:
            loop.send(False)
        except StopIteration:
            pass
        except Exception:
            log.debug("an idle loop did not end", exc_info=True)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        poll, drive, idle = poller.poll, self._drive, self._idle
        try:
            while not self._closed and not self._over:
                poll()
                if self._closed:
                    break
                if idle:
                    drive(idle.pop(), True)
                elif self._live < REQUESTS_MAX:
                    self._begin()
                    self.begun.set()
                else:
                    time.sleep(0.002)
        except Exception:
            log.exception("the session ended by an error of its own")
        finally:
            self._over = True
            self._ended()

    def _begin(self) -> None:
        loop = self._make()
        self._live += 1
        if loop.send(None) is not READY:
            raise RuntimeError("pyfuse3's session loop does not wait where it should")
        self._drive(loop, True)

    def _drive(self, loop: Loop, value: object) -> None:
        try:
            trap = loop.send(value)
        except StopIteration:
            self._live -= 1
            self._over = True
            return
        except OSError as error:
            self._live -= 1
            if error.errno != errno.EAGAIN:
                log.warning("receiving from the kernel failed: %s", error)
                if error.errno in (errno.ENODEV, errno.EBADF, errno.ENOTCONN):
                    self._over = True
            return
        except Exception:
            self._live -= 1
            log.exception("an exception left a handler")
            return
        if trap is READY:
            if len(self._idle) < IDLE_MAX:
                self._idle.append(loop)
            else:
                self._live -= 1
                self._end(loop)
        else:
            trap(Resume(self, loop))  # type: ignore[operator]
