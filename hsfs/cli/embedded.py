"""The embedded metadata server: joined when it runs, started detached when it does not.

Any number of mounts may do this at the same moment: the server that gets the lock of the state
serves, the others step back, and everybody joins.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from hsfs.cli.mds_process import IDLE_S, LOG_NAME, definition_of
from hsfs.core.config import Volume, encode_volume
from hsfs.core.errors import Busy, TimedOut, Unavailable, from_code
from hsfs.rpc.address import Address, state_address
from hsfs.rpc.blocking import BlockingClient

START_TIMEOUT_S = 60.0
_PAUSE_S = 0.05
_TAIL_LINES = 5


def ensure_embedded(
    volume: Volume, *, timeout_s: float = START_TIMEOUT_S, idle_s: float = IDLE_S
) -> Address:
    """Blocking: the address of a server of this volume that answers, started if need be. A running
    one is told when the volume's definition has changed.

    Raises Unavailable with the log's end when it can't be started, TimedOut, Busy (something else
    holds the state), Unauthorised, ConfigError (the state belongs to another volume).
    """
    address = state_address(volume.state)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            _join(volume, address, max(1.0, deadline_s - time.monotonic()))
            return address
        except TimedOut:
            raise
        except Unavailable:
            pass  # none listens, or one that is about to end
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimedOut(str(address), "the metadata server did not start", _tail(volume.state))
        try:
            _start(volume, left_s, idle_s)
        except Busy as error:
            # Another one starts, or ends: see whether it answers, or lets the lock go.
            if time.monotonic() + _PAUSE_S >= deadline_s:
                raise error
            time.sleep(_PAUSE_S)


def _join(volume: Volume, address: Address, timeout_s: float) -> None:
    with BlockingClient(address, timeout_s=min(20.0, timeout_s)) as client:
        if client.welcome.definition != definition_of(volume) or (
            client.welcome.volume != volume.name
        ):
            client.define(encode_volume(volume))


def _start(volume: Volume, timeout_s: float, idle_s: float) -> None:
    """Start a server; returns when it serves. Raises Busy when another one has the state."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                *("-I", "-m", "hsfs.cli.mds_process"),
                *("--ready-fd", str(writer), "--idle", str(idle_s)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        writer = -1
        # It takes the volume, leaves a child behind and ends.
        try:
            _, complaint = process.communicate(encode_volume(volume), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise TimedOut("metadata server", "did not start") from None
        if process.returncode:
            words = complaint.decode("utf-8", "replace").strip().splitlines()
            raise Unavailable(
                "metadata server", "can't be started", "; ".join(words[-_TAIL_LINES:])
            )
        _await_ready(volume, reader, timeout_s)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _await_ready(volume: Volume, reader: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    text = b""
    while not text.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([reader], [], [], left_s)[0]:
            raise TimedOut("metadata server", "did not start in time", _tail(volume.state))
        piece = os.read(reader, 65536)
        if not piece:
            raise Unavailable("metadata server", "died while starting", _tail(volume.state))
        text += piece
    report: dict[str, object] = msgspec.json.decode(text)
    if "code" in report:
        raise from_code(
            str(report["code"]), str(report["what"]), str(report["why"]), str(report["next"])
        )


def _tail(state: Path) -> str:
    path = state / LOG_NAME
    try:
        lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return f"its log would be {path}"
    return f"the end of {path}: " + " | ".join(lines)
