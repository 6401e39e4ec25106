"""Blocking client of a mount's control socket, for the command line.

Protocol: one connection per call. The caller sends one JSON line `{"op": ..., "args": {...}}`; the
mount answers with any number of `{"progress": {...}}` lines and one last line, `{"result": {...}}`
or `{"error": {"code", "what", "why", "next"}}`. Closing the connection cancels the call. Names
that are not UTF-8 travel as lone surrogates (`os.fsdecode`).
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hsfs.core.errors import HsfsError, ProtocolError, TimedOut, Unavailable, from_code

LINE_MAX = 64 * 1024 * 1024
_ADDRESS_MAX = 107  # sun_path of unix(7), without its terminating zero

Json = dict[str, object]


def _connect(path: Path, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_s)
        address = os.fsencode(path)
        if len(address) <= _ADDRESS_MAX:
            sock.connect(address)
        else:
            folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
    except BaseException:
        sock.close()
        raise
    return sock


def _request(op: str, args: Mapping[str, object]) -> bytes:
    return json.dumps({"op": op, "args": dict(args)}).encode() + b"\n"


def _answer(line: bytes) -> tuple[Json | None, Json | None]:
    """(progress, None) or (None, result). Raises what the mount raised."""
    try:
        message = json.loads(line)
    except ValueError as e:
        raise ProtocolError("control socket", f"answered no JSON: {e}") from None
    if not isinstance(message, dict):
        raise ProtocolError("control socket", "answered no JSON object")
    if isinstance(error := message.get("error"), dict):
        text = {key: str(error.get(key, "")) for key in ("code", "what", "why", "next")}
        raise from_code(text["code"], text["what"], text["why"], text["next"])
    progress, result = message.get("progress"), message.get("result")
    if isinstance(progress, dict):
        return progress, None
    if isinstance(result, dict):
        return None, result
    raise ProtocolError("control socket", "answered neither progress nor a result")


def call(
    path: Path,
    op: str,
    args: Mapping[str, object],
    *,
    silence_s: float,
    progress: Callable[[Json], None] | None = None,
) -> Json:
    """The result of one operation. `silence_s`: longest time without a byte from the mount.
    Raises Unavailable (nobody listens), TimedOut, and whatever the mount answered."""
    what = f"mount's control socket {path}"
    try:
        with _connect(path, silence_s) as sock:
            sock.sendall(_request(op, args))
            with sock.makefile("rb") as lines:
                while True:
                    line = lines.readline(LINE_MAX)
                    if not line.endswith(b"\n"):
                        raise Unavailable(what, "the mount ended in the middle of the call")
                    step, result = _answer(line)
                    if result is not None:
                        return result
                    if step is not None and progress is not None:
                        progress(step)
    except TimeoutError as e:
        raise TimedOut(what, f"the mount does not answer for {silence_s:g} s") from e
    except OSError as e:
        raise Unavailable(what, e.strerror or str(e)) from e


def call_many(
    paths: Sequence[Path], op: str, args: Mapping[str, object], *, deadline_s: float
) -> list[Json | HsfsError]:
    """One short call to each of several mounts at the same time, all within one deadline, so that
    one that hangs costs the others nothing. No progress lines."""
    answers: list[Json | HsfsError] = [TimedOut("mount", "does not answer") for _ in paths]
    end = time.monotonic() + deadline_s
    waiting: dict[int, tuple[int, socket.socket, bytearray]] = {}
    poll = select.poll()
    try:
        for index, path in enumerate(paths):
            try:
                sock = _connect(path, max(end - time.monotonic(), 0.05))
                waiting[sock.fileno()] = (index, sock, bytearray())
                sock.sendall(_request(op, args))
                poll.register(sock, select.POLLIN)
            except TimeoutError:
                continue  # a backlog that nobody empties: the answer stays TimedOut
            except OSError as e:
                answers[index] = Unavailable("mount", e.strerror or str(e))
        open_fds = set(waiting)
        while open_fds and (left := end - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                index, sock, buffer = waiting[fd]
                try:
                    data = sock.recv(1 << 18)
                except OSError as e:
                    data, answers[index] = b"", Unavailable("mount", e.strerror or str(e))
                buffer += data
                if data and not buffer.endswith(b"\n"):
                    continue
                try:
                    step, result = _answer(bytes(buffer)) if buffer else (None, None)
                    answers[index] = result or step or Unavailable("mount", "ended")
                except HsfsError as e:
                    answers[index] = e
                poll.unregister(fd)
                open_fds.discard(fd)
    finally:
        for _, sock, _ in waiting.values():
            sock.close()
    return answers
