"""Our own metadata server as a process: `Mds(volume)` runs it in the foreground, with a mover."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hsfs.core.config import Volume, decode_volume, encode_volume, parse_volume
from hsfs.core.errors import HsfsError
from hsfs.rpc.address import Address, state_address
from hsfs.rpc.blocking import BlockingClient
from tests.servers.process import Process, ServerError

if TYPE_CHECKING:
    from hsfs.proto.messages import ScanStatus

LIMIT_S = 120.0


def make_volume(state: Path, backends: dict[str, str], extra: str = "") -> Volume:
    """A volume named "t" with `name -> url`; `extra` is appended to every backend's table."""
    text = f'[volume]\nname = "t"\nstate = "{state}"\n'
    for name, url in backends.items():
        text += f'[[backend]]\nname = "{name}"\nurl = "{url}"\n{extra}\n'
    return parse_volume(text, state / "volume.toml")


class Mds:
    """One server process on a volume; `with Mds(volume) as mds: connect(mds.address)`.

    Killed with this process. Its mover ends with it.
    """

    def __init__(self, volume: Volume, **options: object) -> None:
        self.volume = volume
        self.address: Address = state_address(volume.state)
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="hsfs-mds-"))
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def start(self) -> None:
        """Returns when it answers. Raises ServerError with its log."""
        definition = self._folder / "volume.json"
        definition.write_bytes(encode_volume(self.volume))
        self._process = Process(
            [sys.executable, "-m", "tests.servers.mds", str(definition), repr(self._options)],
            log=self._folder / "log",
            cwd=Path(__file__).resolve().parents[2],
        )
        self._process.wait_until(self._answers, what="metadata server")

    def _answers(self) -> bool:
        try:
            with BlockingClient(self.address, timeout_s=5) as client:
                return client.welcome.pid == self.pid
        except HsfsError:
            return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the server only; SIGKILL and SIGTERM wait for its end."""
        assert self._process is not None
        self._process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            deadline = time.monotonic() + LIMIT_S
            while self._process.running:
                if time.monotonic() > deadline:
                    raise ServerError("the metadata server does not end")
                time.sleep(0.01)

    @property
    def mover_pid(self) -> int | None:
        """The mover child's, when one runs."""
        found = children(self.pid)
        return found[0] if found else None

    def wait_scanned(self, limit_s: float = LIMIT_S) -> tuple[ScanStatus, ...]:
        """Until all scans are done."""
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(HsfsError), BlockingClient(self.address) as client:
                scans = client.scans()
                if scans and all(scan.state in ("done", "lazy") for scan in scans):
                    return scans
            if time.monotonic() > deadline:
                raise ServerError(f"scans are not done: {self.log[-3000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it, remove its log."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.stop()
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def children(pid: int) -> list[int]:
    """pids of a process's children."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def end(pid: int) -> None:
    """SIGKILL one process and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while alive(pid):
        if time.monotonic() > deadline:
            raise ServerError(f"process {pid} does not end")
        time.sleep(0.01)


def main() -> None:
    import ast

    from hsfs.cli.mds_process import Options, run
    from hsfs.telemetry.logs import set_up_logging

    set_up_logging("mds")
    options = Options(**ast.literal_eval(sys.argv[2]))
    run(decode_volume(Path(sys.argv[1]).read_bytes()), options, lambda serving: None)


if __name__ == "__main__":
    main()
