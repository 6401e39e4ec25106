"""A proxy in front of a real server that makes the faults of networks and of bad servers.

It is a process of its own (`proxy_process.py`), so the bytes cost the client's process nothing.
`mode="tcp"` for NFS knows delay, cap, cut, corrupt, hole, refuse and drop; `mode="http"` all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from tests.servers.process import Process, Server

_PROCESS = Path(__file__).with_name("proxy_process.py")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request as the proxy saw it; `body` is the length of the reply's body in bytes."""

    method: str
    target: str
    range: str
    status: int
    body: int


class Proxy(Server):
    """Forwards 127.0.0.1:`port` to the target. All methods may be called while it forwards.

    The fault methods share: `times` (how often it happens; None = always), `every` (only each n-th
    matching reply), `path` (a part of the request's target), `method`, and `min_body` (only replies
    of at least so many bytes: spares listings).
    """

    def __init__(self, target_port: int, target_host: str = "127.0.0.1", *, mode: str = "http"):
        super().__init__("proxy")
        self.port = self._port()
        self._target = (target_host, target_port)
        self._mode = mode
        self._process: Process | None = None
        self._control: socket.socket | None = None
        self._lines: Any = None
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        """The URL of the HTTP face."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The pid of the proxy."""
        assert self._process is not None, "not started"
        return self._process.pid

    def delay(self, seconds: float) -> None:
        """Each reply comes so much later; 0 ends it (over TCP for new connections only)."""
        self._order("delay", s=seconds)

    def cap(self, bytes_per_s: float, *, up_bytes_per_s: float = 0) -> None:
        """Limits all replies together (and all requests together); 0 = no limit."""
        self._order("cap", down=bytes_per_s, up=up_bytes_per_s)

    def cut(self, after: int, **which: Any) -> None:
        """Resets the connection after so many bytes of the body (over TCP: of the stream)."""
        self._rule("cut", which, after=after)

    def truncate(self, after: int, **which: Any) -> None:
        """Closes in good order after so many bytes of a body that was announced as longer."""
        self._rule("truncate", which, after=after)

    def short(self, after: int, **which: Any) -> None:
        """Sends only so many bytes and announces just those: a well-formed, wrong reply."""
        self._rule("short", which, after=after)

    def corrupt(self, offset: int, **which: Any) -> None:
        """Inverts the byte at an offset of the body (over TCP: of the stream)."""
        self._rule("corrupt", which, offset=offset)

    def error_body(self, body: str = "", **which: Any) -> None:
        """Answers 200 with an XML error document, or another body."""
        self._rule("error_body", which, status=200, body=body, retry_after_s=None)

    def status(
        self,
        status: int = 503,
        *,
        retry_after_s: int | None = None,
        body: str = "",
        **which: Any,
    ) -> None:
        """Answers with a status, an XML error document and perhaps Retry-After."""
        self._rule("status", which, status=status, body=body, retry_after_s=retry_after_s)

    def hole(self, on: bool = True) -> None:
        """Accepts and says nothing, and stops what flows; False goes on where it stopped."""
        self._order("hole", on=on)

    def refuse(self, on: bool = True) -> None:
        """Refuses connections and drops those there are; False listens again."""
        self._order("refuse", on=on)

    def drop(self) -> None:
        """Closes all connections once."""
        self._order("drop")

    def clear(self) -> None:
        """Ends every fault, delay and cap."""
        self._order("clear")

    def counts(self) -> dict[str, int]:
        """connections, requests, bytes_down, bytes_up and fault_KIND since `forget`."""
        zeros = dict.fromkeys(("connections", "requests", "bytes_down", "bytes_up"), 0)
        return {**zeros, **self._order("counts")}

    def requests(self) -> list[Request]:
        """The HTTP requests since `forget`, oldest first (the last 200,000)."""
        return [Request(*entry) for entry in self._order("log")]

    def forget(self) -> None:
        """Sets the counts to 0 and empties the list of requests."""
        self._order("forget")

    def _rule(self, kind: str, which: dict[str, Any], **numbers: Any) -> None:
        rule = {"times": None, "every": 1, "path": "", "method": "", "min_body": 0}
        if unknown := which.keys() - rule.keys():
            raise TypeError(f"unknown: {unknown}")
        self._order("rule", rule={**rule, **which, **numbers, "kind": kind})

    def _order(self, do: str, **arguments: Any) -> Any:
        with self._lock:
            if self._lines is None:
                raise RuntimeError("the proxy is not running")
            self._lines.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._lines.flush()
            answer = json.loads(self._lines.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["ok"]

    def _launch(self) -> None:
        control = self.folder / "control"
        self._process = Process(
            [
                *(sys.executable, "-I", "-S", str(_PROCESS), str(control)),
                *(str(self.port), self._target[0], str(self._target[1]), self._mode),
            ],
            log=self.folder / "out",
        )

        def connected() -> bool:
            s = socket.socket(socket.AF_UNIX)
            try:
                s.connect(str(control))
            except OSError:
                s.close()
                return False
            self._control, self._lines = s, s.makefile("rwb")
            return True

        self._process.wait_until(connected, what="proxy")

    def _halt(self) -> None:
        if self._lines is not None:
            with contextlib.suppress(OSError):
                self._lines.close()
            self._lines = None
        if self._control is not None:
            self._control.close()
            self._control = None
        process, self._process = self._process, None
        if process is not None:
            process.stop(signal.SIGKILL)
