"""The command `hsfs` as a user runs it, over volumes of a test: run, mount, look, clean up."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hsfs.core.config import default_state, volume_name

BIN = Path(sys.executable).parent
DEADLINE_S = 120


def eventually(condition, deadline_s=60.0):
    """The first true value of `condition`; the last value when the time is over."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value or time.monotonic() > end:
            return value
        time.sleep(0.05)


class Sandbox:
    """A folder with a source tree, volume files and mountpoints of its own; leaves nothing behind,
    however the test ends."""

    def __init__(self):
        self.root = Path(tempfile.mkdtemp(prefix="hsfs-cli-", dir="/tmp"))
        self.source = self.root / "src"
        self.source.mkdir()
        self.environment = {
            **{k: v for k, v in os.environ.items() if k != "HSFS_DEBUG"},
            "HSFS_RUNTIME_DIR": str(self.root / "run"),
            "XDG_STATE_HOME": str(self.root / "home"),
        }
        self.name = self.root.name.replace("_", "-")  # of the volume: nobody else's
        self._places = {self.name}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.clean()

    # -- making ----------------------------------------------------------------------------------

    def put(self, name, data=b"hello\n"):
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    @property
    def state(self):
        return self.root / "state"

    def volume(self, *backends, extra=""):
        """A volume file; without backends it has the source at its root."""
        text = [f'[volume]\nname = "{self.name}"\nstate = "{self.state}"\n']
        for backend in backends or ({"name": "src", "url": f"file://{self.source}", "at": "/"},):
            text.append("[[backend]]")
            text += [f"{key} = {json.dumps(value)}" for key, value in backend.items()]
        path = self.root / "v.toml"
        path.write_text("\n".join([*text, extra, ""]))
        return path

    def mountpoint(self, name="mnt"):
        path = self.root / name
        path.mkdir(exist_ok=True)
        self._places.add(volume_name(path))
        return path

    def claim(self, name):
        """Another volume's name whose state goes with the sandbox; the name."""
        self._places.add(name)
        return name

    # -- running ---------------------------------------------------------------------------------

    def run(self, *words, program="hsfs", prefix=(), check=None, **options):
        """The finished process. Pipes are read to their end: a daemon that kept one open would make
        this hang, and fail by the deadline."""
        options.setdefault("env", self.environment)
        options.setdefault("cwd", self.root)
        done = subprocess.run(
            [*prefix, str(BIN / program), *map(str, words)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            stdin=subprocess.DEVNULL,
            **options,
        )
        if check is not None:
            assert done.returncode == check, (
                f"{words}: {done.returncode}\n{done.stderr}\n{self.logs()}"
            )
        return done

    def json(self, *words, check=0, **options):
        done = self.run(*words, "--json", check=check, **options)
        value = json.loads(done.stdout)
        assert value["schema"] == 1
        return value

    def mount(self, *words, check=0, **options):
        return self.run("mount", *words, check=check, **options)

    def status(self, mountpoint):
        """The mount's part of `status`, None when it is not there."""
        done = self.run("status", "--json")
        mounts = json.loads(done.stdout)["mounts"]
        return next((m for m in mounts if m["mountpoint"] == str(mountpoint)), None)

    # -- looking ---------------------------------------------------------------------------------

    def mounted(self, mountpoint):
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        return any(line.split(" ")[4] == str(mountpoint) for line in text.splitlines())

    def logs(self):
        text = ""
        for path in sorted(self.root.rglob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-15:]
            text += f"--- {path}\n" + "\n".join(tail) + "\n"
        return text

    # -- the end ---------------------------------------------------------------------------------

    def clean(self):
        for record in (self.root / "run").glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                end(json.loads(record.read_text())["pid"])
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            place = line.split(" ")[4]
            if place.startswith(f"{self.root}/"):
                subprocess.run(["umount", "-l", place], check=False, timeout=30)
        for pid_file in self.root.rglob("mds.pid"):
            _end_server(pid_file.parent)
        states = [default_state(name) for name in self._places]
        for folder in states:
            _end_server(folder)
        for folder in (*states, self.root):
            shutil.rmtree(folder, ignore_errors=True)


def _end_server(state):
    with contextlib.suppress(OSError, ValueError):
        end(int((state / "mds.pid").read_text()))


def end(pid, number=signal.SIGTERM):
    """Signal a process and wait until it is gone; at last with SIGKILL."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, number)
        if not gone(fd, 30):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            gone(fd, 30)
    finally:
        os.close(fd)


def gone(pidfd, deadline_s):
    """Whether the process of a pidfd ends in time."""
    import select

    return bool(select.select([pidfd], [], [], deadline_s)[0])
