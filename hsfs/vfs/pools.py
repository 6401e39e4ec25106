"""Worker threads for blocking work: one pool per device, so that a dead one starves nobody else.

Threads are daemonic and started on demand: a backend that hangs past its own deadline is left
behind at exit. A job costs one hand-over (a lock, a deque, one wake-up), several times less than
the event loop's own thread hop. Urgent jobs (somebody waits) go before those run ahead of need.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]

_IDLE_S = 20.0


class Pool:
    """Up to `size` threads that run jobs. A job must not raise: `on_error` gets what does."""

    def __init__(self, name: str, size: int, on_error: Callable[[BaseException], None]) -> None:
        self.name = name
        self.size = size
        self._on_error = on_error
        self._condition = threading.Condition(threading.Lock())
        self._urgent: deque[Job] = deque()
        self._later: deque[Job] = deque()
        self._threads = 0
        self._idle = 0
        self._started = 0
        self._closed = False

    @property
    def load(self) -> int:
        """Jobs that run or wait."""
        return self._threads - self._idle + len(self._urgent) + len(self._later)

    @property
    def waiting(self) -> int:
        """Jobs that no thread has taken yet."""
        return len(self._urgent) + len(self._later)

    def submit(self, job: Job, *, urgent: bool = True) -> bool:
        """Run `job` in a thread of the pool; False when the pool is closed."""
        with self._condition:
            if self._closed:
                return False
            (self._urgent if urgent else self._later).append(job)
            if self._idle >= len(self._urgent) + len(self._later):
                self._condition.notify()
                return True
            if self._threads >= self.size:
                if self._idle:
                    self._condition.notify()
                return True
            self._threads += 1
            self._started += 1
            name = f"{self.name}-{self._started}"
        threading.Thread(target=self._run, name=name, daemon=True).start()
        return True

    def close(self) -> None:
        """Forget the jobs that have not begun and let the threads go as they finish."""
        with self._condition:
            self._closed = True
            self._urgent.clear()
            self._later.clear()
            self._condition.notify_all()

    def _run(self) -> None:
        condition = self._condition
        while True:
            with condition:
                while not self._urgent and not self._later:
                    if self._closed:
                        self._threads -= 1
                        return
                    self._idle += 1
                    woken = condition.wait(_IDLE_S)
                    self._idle -= 1
                    if not woken and not self._urgent and not self._later:
                        self._threads -= 1
                        return
                job = self._urgent.popleft() if self._urgent else self._later.popleft()
            try:
                job()
            except BaseException as error:  # a pool thread must survive any job
                self._on_error(error)
            del job
