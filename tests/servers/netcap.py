"""A network with a bandwidth cap for benches: a namespace at the other end of a veth pair, with a
token bucket (tc tbf) on the server's side. The kernel does the capping, so no process of ours burns
CPU in the path, as the proxy's `cap` would. Needs root.

The addresses are link-local (169.254.x.y/30): they can't leave the pair.
"""

from __future__ import annotations

import random
import signal
import subprocess

from tests.servers.process import Process, Server, ServerError, executable


class CappedNet(Server):
    """A server started behind `enter` and bound to `address` sends at most `bytes_per_s`.

    Pass it as `net=` to SeaweedFS or Ganesha. It ends with its last process.
    """

    def __init__(self, bytes_per_s: float, *, burst: int = 1 << 20) -> None:
        super().__init__("net")
        self.bytes_per_s = bytes_per_s
        self._burst = burst
        self._holder: Process | None = None
        number = random.Random().randrange(16, 254 << 6)
        # Not 169.254.169.254: clients of the clouds look for credentials there.
        third, fourth = divmod(number * 4 % (250 << 8), 256)
        third += third >= 169
        self.client_address = f"169.254.{third}.{fourth + 1}"
        self.address = f"169.254.{third}.{fourth + 2}"
        self._device = f"hsfs{random.Random().randrange(1 << 32):08x}"

    @property
    def enter(self) -> tuple[str, ...]:
        """What to put before a command line to run it at the server's end."""
        assert self._holder is not None, "not started"
        return (executable("nsenter"), f"--net=/proc/{self._holder.pid}/ns/net", "--")

    def set_rate(self, bytes_per_s: float) -> None:
        """Changes the cap; 0 takes it away."""
        self.bytes_per_s = bytes_per_s
        self._inside("tc", "qdisc", "del", "dev", "server", "root", check=False)
        if bytes_per_s:
            rate = f"{int(bytes_per_s * 8)}bit"
            self._inside(
                *("tc", "qdisc", "add", "dev", "server", "root", "tbf"),
                *("rate", rate, "burst", str(self._burst), "latency", "100ms"),
            )

    def sent_bytes(self) -> int:
        """Bytes that the server's side has sent, headers included."""
        text = self._inside("cat", "/proc/net/dev")
        line = next(x for x in text.splitlines() if x.strip().startswith("server:"))
        return int(line.split(":")[1].split()[8])

    def _inside(self, *argv: str, check: bool = True) -> str:
        return _run(*self.enter, executable(argv[0]), *argv[1:], check=check)

    def _launch(self) -> None:
        self._holder = Process(
            [executable("unshare"), "--net", "--", executable("sleep"), "infinity"],
            log=self.folder / "out",
        )
        holder = self._holder
        own = _run(executable("readlink"), "/proc/self/ns/net")

        def apart() -> bool:
            there = _run(executable("readlink"), f"/proc/{holder.pid}/ns/net", check=False)
            return bool(there) and there != own

        holder.wait_until(apart, what="network namespace")
        _run(
            *(executable("ip"), "link", "add", self._device, "type", "veth"),
            *("peer", "name", "server", "netns", str(holder.pid)),
        )
        # Not announced, not configured by anything else on the machine.
        _run(executable("ip"), "addr", "add", f"{self.client_address}/30", "dev", self._device)
        _run(executable("ip"), "link", "set", self._device, "up")
        self._inside("ip", "addr", "add", f"{self.address}/30", "dev", "server")
        self._inside("ip", "link", "set", "server", "up")
        self._inside("ip", "link", "set", "lo", "up")
        self.set_rate(self.bytes_per_s)

    def _halt(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            # The pair goes with either end; the namespace goes with its last process.
            _run(executable("ip"), "link", "del", self._device, check=False)
            holder.stop(signal.SIGKILL)


def _run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if check and done.returncode:
        raise ServerError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
