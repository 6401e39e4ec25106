"""What all launchers share: a server process that dies with this one and keeps its log.

Every process gets SIGKILL from the kernel when its parent dies. The kernel looks at the parent
*thread*, so all processes are made by one thread that lives as long as this process does.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.servers import ports

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

START_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0


class ServerError(Exception):
    """A server did not start, or ended by itself; the text ends with its log."""


class _Spawner:
    """Makes processes from one thread for ever (see the module's text)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._work: queue.SimpleQueue[
            tuple[Callable[[], subprocess.Popen[bytes]], concurrent.futures.Future]
        ] = queue.SimpleQueue()

    def spawn(self, make: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._thread is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._thread = threading.Thread(target=self._run, name="spawner", daemon=True)
                self._thread.start()
        done: concurrent.futures.Future[subprocess.Popen[bytes]] = concurrent.futures.Future()
        self._work.put((make, done))
        return done.result()

    def _run(self) -> None:
        while True:
            make, done = self._work.get()
            try:
                done.set_result(make())
            except BaseException as e:
                done.set_exception(e)
            del make, done


_spawner = _Spawner()


def executable(name: str) -> str:
    """The path of a program: beside this Python, else in PATH or the sbin folders.

    Raises ServerError when there is none.
    """
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin:/usr/local/sbin"
    found = shutil.which(name, path=path)
    if found is None:
        raise ServerError(f"{name} is not installed: run packaging/setup.sh")
    return found


class Process:
    """One child process with a log file; SIGKILLed when this process ends, however it ends."""

    def __init__(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.log = log
        self.argv = [os.fspath(a) for a in argv]
        full_env = dict(os.environ)
        full_env.update(env or {})
        full = [executable("setpriv"), "--pdeathsig", "KILL", "--", *self.argv]

        def make() -> subprocess.Popen[bytes]:
            with log.open("ab") as out:
                return subprocess.Popen(
                    full,
                    stdin=stdin,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=full_env,
                    cwd=cwd,
                    pass_fds=pass_fds,
                    start_new_session=True,
                )

        self._popen = _spawner.spawn(make)
        self.pid = self._popen.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._popen.poll() is None

    @property
    def stdin_fd(self) -> int:
        """The writing end of the child's standard input (made with stdin=PIPE)."""
        assert self._popen.stdin is not None
        return self._popen.stdin.fileno()

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def send_signal(self, number: int) -> None:
        """Sends a signal to this process only; one that has ended is ignored."""
        if self.running:
            self._popen.send_signal(number)

    def wait_until(
        self, ready: Callable[[], bool], *, what: str, limit_s: float = START_LIMIT_S
    ) -> None:
        """Polls `ready`. Raises ServerError with the log when the process ends or time is up."""
        deadline = time.monotonic() + limit_s
        pause_s = 0.01
        while not ready():
            if not self.running:
                code = self._popen.returncode
                raise ServerError(f"{what}: ended with {code}; its log:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{what}: not ready in {limit_s:.0f} s; log:\n{self.log_tail()}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)

    def stop(self, number: int = signal.SIGTERM, *, limit_s: float = STOP_LIMIT_S) -> None:
        """Ends the process: the signal, then after the limit SIGKILL to its process group."""
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        if self.running:
            if number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                self._popen.send_signal(number)
            self._popen.send_signal(signal.SIGCONT)
            try:
                self._popen.wait(limit_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._popen.kill()
        self._popen.wait()


class Server:
    """A launcher: `start` and `stop`, or used in a with statement.

    A subclass makes its processes in `_launch` and ends them in `_halt`; `stop` leaves no process,
    port or folder behind, also after a start that failed half-way.
    """

    host = "127.0.0.1"
    """Where the server listens; another address only in a network of its own (netcap.py)."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Made by `start`, so that a launcher which is never started leaves nothing either.
        self.folder = Path(tempfile.gettempdir(), f"hsfs-{name}-{secrets.token_hex(6)}")
        self._ports: list[int] = []

    def start(self) -> Self:
        """Starts the server and returns when it answers. Raises ServerError, never skips."""
        self.folder.mkdir(mode=0o700)
        try:
            self._launch()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends the server and removes what it made; safe to call twice."""
        try:
            self._halt()
        finally:
            for port in self._ports:
                ports.release(port)
            self._ports.clear()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _launch(self) -> None:
        raise NotImplementedError

    def _halt(self) -> None:
        raise NotImplementedError

    def _port(self, *, pair: bool = False) -> int:
        port = ports.free_port(pair=pair)
        self._ports.append(port)
        return port

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def children(pid: int) -> list[int]:
    """Pids of all descendants of a process, nearest first."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The command name may hold spaces and brackets: the fields follow its last ")".
            rest = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2]
            parents.setdefault(int(rest.split()[1]), []).append(int(entry))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = parents.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def wait_stopped(pid: int, *, limit_s: float = STOP_LIMIT_S) -> None:
    """Returns when a SIGSTOP has reached every thread of a process: the signal alone is quicker.

    Raises ServerError when time is up.
    """
    deadline = time.monotonic() + limit_s
    while set(_thread_states(pid)) - set("Tt"):
        if time.monotonic() > deadline:
            raise ServerError(f"process {pid} has not stopped in {limit_s:.0f} s")
        time.sleep(0.005)


def _thread_states(pid: int) -> str:
    states = ""
    for thread in os.listdir(f"/proc/{pid}/task"):
        # A thread that ends meanwhile has no state.
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/task/{thread}/stat").read_text(errors="replace")
            states += text.rpartition(")")[2].split()[0]
    return states


def command_name(pid: int) -> str:
    """The kernel's name of a process (15 bytes at most), or "" when it is gone."""
    try:
        return Path("/proc", str(pid), "comm").read_text().strip()
    except OSError:
        return ""
