"""One metadata server per state directory: its lock, sockets and files, its child, its end.

The lock is flock on STATE/lock, which dies with the process; the file tells who holds it. A socket
that a killed server left is removed by the next holder of the lock. The server leaves when its
state directory was removed or replaced, since what it would write there nobody would find.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from hsfs.core.errors import Busy, from_os_error
from hsfs.rpc.address import SOCKET_NAME, TOKEN_NAME, read_token, socket_name

log = structlog.get_logger("hsfs.mds.life")

LOCK_NAME = "lock"
_CHILD_PAUSE_MAX_S = 10.0
_FIRST_WORD_S = 60.0


class StateLock:
    """Ownership of a state directory. Raises Busy naming the holder's volume and pid, NoSpace,
    PermissionDenied and other leaves for a directory that can't be used."""

    def __init__(self, state: Path, volume: str) -> None:
        self.state = state
        try:
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(state / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise from_os_error(error, str(state)) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 4096, 0).decode("utf-8", "replace").split()
            os.close(self._fd)
            who = f'metadata server of "{holder[1]}", pid {holder[0]}' if len(holder) > 1 else ""
            raise Busy(
                str(state), f"in use by another {who or 'process'}", "use that one, or end it"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()} {volume}\n".encode(), 0)

    def still_there(self) -> bool:
        """Whether the directory is still the one that was locked."""
        try:
            there = os.stat(self.state / LOCK_NAME)
        except OSError:
            return False
        ours = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def release(self) -> None:
        """Let the next one in. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock_holder(state: Path) -> int | None:
    """pid of the process that holds a state's lock; None = nobody does."""
    try:
        fd = os.open(state / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        words = os.pread(fd, 64, 0).split()
        return int(words[0]) if words and words[0].isdigit() else 0
    finally:
        os.close(fd)
    return None


def bind_unix(state: Path) -> socket.socket:
    """The server's socket, for its user only; the lock must be held. Raises OSError."""
    path = state / SOCKET_NAME
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_name(path) as name:
            sock.bind(name)
        # Nobody can connect before listen(), so that the mode holds from the first moment on.
        os.chmod(path, 0o600)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def bind_tcp(host: str, port: int) -> socket.socket:
    """A TCP socket. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def ensure_token(state: Path) -> str:
    """The token of TCP clients, made at the first start. Raises PermissionDenied, Unauthorised."""
    path = state / TOKEN_NAME
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return read_token(path)


class Child:
    """A process that runs as long as the server does, and is started again when it dies.

    Its stdin is a pipe that ends with us, however we end: the child watches it. One that is silent
    for `silent_s` (`heard(pid)`: when it last spoke, monotonic, None = never) is killed.
    """

    def __init__(
        self, argv: Sequence[str], heard: Callable[[int], float | None], silent_s: float
    ) -> None:
        self._argv = argv
        self._heard = heard
        self._silent_s = silent_s
        self._process: asyncio.subprocess.Process | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The running child's."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def run(self) -> None:
        """Until cancelled; the child has ended then."""
        pause_s = 0.1
        while True:
            began_s = asyncio.get_running_loop().time()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv, stdin=asyncio.subprocess.PIPE, start_new_session=True
                )
            except OSError as error:
                log.error("the mover can't be started", why=str(error))
            else:
                try:
                    code = await self._watched(self._process)
                except asyncio.CancelledError:
                    await self._end(self._process)
                    raise
                log.warning("the mover ended and is started again", code=code)
            self.restarts += 1
            if asyncio.get_running_loop().time() - began_s > 10:
                pause_s = 0.1
            await asyncio.sleep(pause_s)
            pause_s = min(_CHILD_PAUSE_MAX_S, pause_s * 2)

    async def _watched(self, process: asyncio.subprocess.Process) -> int:
        """Its exit code, when it has ended by itself or was silent for too long."""
        # A first word may take long: Python starts slowly on a busy machine.
        heard_s = time.monotonic() + _FIRST_WORD_S - self._silent_s
        while True:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes in the moment in
            # which the process ends, and a server stopped together with its child would wait for
            # this task for ever.
            try:
                async with asyncio.timeout(1.0):
                    return await process.wait()
            except TimeoutError:
                pass
            heard_s = self._heard(process.pid) or heard_s
            if time.monotonic() - heard_s > self._silent_s:
                log.warning("the mover is silent and is killed", pid=process.pid)
                process.kill()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            try:
                process.send_signal(sent)
                async with asyncio.timeout(3):
                    await process.wait()
            except TimeoutError:
                continue
            except ProcessLookupError:
                pass
            return
