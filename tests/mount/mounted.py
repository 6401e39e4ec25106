"""A real kernel mount of a source directory, for tests: `with mounted(source, tmp) as mount`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


class Mounted:
    def __init__(self, process: subprocess.Popen[bytes], mountpoint: Path) -> None:
        self.process = process
        self.mountpoint = mountpoint
        self._rest = b""

    def line(self, timeout_s: float = 60.0) -> dict:
        """The next answer of the daemon."""
        stdout = self.process.stdout
        while b"\n" not in self._rest:
            readable, _, _ = select.select([stdout], [], [], timeout_s)
            data = os.read(stdout.fileno(), 1 << 20) if readable else b""
            if not data:
                raise AssertionError(f"the mount process said nothing: {self.process.poll()}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def do(self, what: str, **arguments: object) -> object:
        self.process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        answer = self.line()
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer["ok"]

    def stats(self) -> dict:
        return self.do("stats")

    def is_mounted(self) -> bool:
        wanted = f" {self.mountpoint} "
        return any(wanted in line for line in Path("/proc/self/mounts").read_text().splitlines())

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)


@contextmanager
def mounted(source: Path, **config: object) -> Iterator[Mounted]:
    """Mount `source`; options as in `daemon`. Unmounted, and the process gone, afterwards."""
    with tempfile.TemporaryDirectory(prefix="hsfs-mount-", dir="/var/tmp") as scratch:
        mountpoint = Path(scratch, "m")
        mountpoint.mkdir()
        settings = {
            "source": str(source),
            "mountpoint": str(mountpoint),
            "cache": str(Path(scratch, "cache")),
            **config,
        }
        Path(settings["cache"]).mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("daemon.py")), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        mount = Mounted(process, mountpoint)
        try:
            assert mount.line() == {"ready": True}
            yield mount
        finally:
            try:
                mount.stop()
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if mount.is_mounted():
                subprocess.run(["umount", "-l", str(mountpoint)], check=False, timeout=30)
            process.stdin.close()
            process.stdout.close()
