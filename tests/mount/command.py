"""Real mounts by the `hsfs` command, for tests that break things: readers that can be given up,
the processes behind a mount, volumes over real servers.

Everything below a folder of its own in /var/tmp; mount, metadata server and mover are ended by pid.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.servers.process import children

BIN = Path(sys.executable).parent
READER = Path(__file__).with_name("reader_process.py")
COMMAND_S = 150.0
SLOW_S = 10.0
PATIENCE_S = 60.0
"""How long something that should happen may take on a busy machine."""


def eventually(
    condition: Callable[[], Any],
    what: str | Callable[[], object] = "",
    limit_s: float = PATIENCE_S,
) -> Any:
    """The first true value of `condition`; AssertionError with `what` when time is up."""
    end = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            said = what() if callable(what) else what
            raise AssertionError(f"not within {limit_s:g} s: {said}; last: {value!r}")
        time.sleep(0.05)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Answer:
    """What a read gave: an errno's name, or a size with a digest. True when it gave bytes."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self.errno: str = value.get("errno", "")
        self.size: int = value.get("size", -1)
        self.digest: str = value.get("digest", "")
        self.text = str(value)

    def __bool__(self) -> bool:
        return not self.errno

    def __repr__(self) -> str:
        return self.text

    def is_(self, data: bytes) -> bool:
        return not self.errno and self.size == len(data) and self.digest == digest(data)

    def which(self, **versions: bytes) -> str:
        """The name of the version that was read, or of the errno. AssertionError for any other
        bytes: they are wrong."""
        if self.errno:
            return self.errno
        for name, data in versions.items():
            if self.is_(data):
                return name
        sizes = {name: (len(data), data[:16].hex()) for name, data in versions.items()}
        raise AssertionError(f"wrong bytes: {self.text}; right would be {sizes}")


class Reader:
    """A child that reads; its handles have names. An order that isn't answered in time is an
    AssertionError. `begin` and `end` let the test act in between."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(READER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._rest = b""
        self._order: Any = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, do: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        self._order = {"do": do, **{k: _text(v) for k, v in arguments.items()}}
        self._process.stdin.write(json.dumps(self._order).encode() + b"\n")
        self._process.stdin.flush()

    def pending(self) -> bool:
        """Whether the order that was begun has no answer yet."""
        assert self._process.stdout is not None
        return b"\n" not in self._rest and not select.select([self._process.stdout], [], [], 0)[0]

    def end(self, limit_s: float = PATIENCE_S) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise AssertionError(f"hangs for {limit_s:g} s: {self._order}")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise AssertionError(f"the reader died at {self._order}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{self._order}: {answer['error']}")
        return answer["ok"]

    def do(self, do: str, limit_s: float = PATIENCE_S, **arguments: object) -> Any:
        self.begin(do, **arguments)
        return self.end(limit_s)

    def read(self, path: object, limit_s: float = PATIENCE_S) -> Answer:
        """A whole file, opened anew."""
        return Answer(self.do("read", limit_s, path=path))

    def open(self, path: object, name: str, limit_s: float = PATIENCE_S) -> str:
        """The errno's name, "" when the handle is open."""
        value = self.do("open", limit_s, path=path, name=name)
        return value["errno"] if isinstance(value, dict) else ""

    def pread(self, name: str, offset: int, size: int, limit_s: float = PATIENCE_S) -> Answer:
        return Answer(self.do("pread", limit_s, name=name, offset=offset, size=size))

    def peek(self, name: str, offset: int, size: int, limit_s: float = PATIENCE_S) -> Answer:
        """Bytes of the mapping that `do("map", name=...)` made."""
        return Answer(self.do("peek", limit_s, name=name, offset=offset, size=size))

    def list(self, path: object, limit_s: float = PATIENCE_S) -> list[str] | str:
        """Names, or an errno's name."""
        value = self.do("list", limit_s, path=path)
        return value if isinstance(value, list) else str(value["errno"])

    def ino(self, path: object, limit_s: float = PATIENCE_S) -> int | str:
        """The inode number, or an errno's name."""
        value = self.do("stat", limit_s, path=path)
        return value.get("ino") or str(value["errno"])

    def kill(self) -> None:
        """SIGKILL, and no waiting: a read that can't be interrupted keeps the process."""
        self._process.kill()

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _text(value: object) -> object:
    return os.fsdecode(value) if isinstance(value, bytes | os.PathLike) else value


class Hsfs:
    """One volume and its mounts. Used in a with statement."""

    def __init__(self, *environments: Mapping[str, str]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="hsfs-test-", dir="/var/tmp"))
        self.name = self.root.name.replace("_", "-")
        self.state = self.root / "state"
        self.cache = self.root / "cache"
        self.env = {k: v for k, v in os.environ.items() if k != "HSFS_DEBUG"}
        self.env["HSFS_RUNTIME_DIR"] = str(self.root / "run")
        for environment in environments:
            self.env.update(environment)
        self._readers: list[Reader] = []
        self.pids: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print(self.logs())
        self.clean()

    # -- making ----------------------------------------------------------------------------------

    def volume(self, *backends: Mapping[str, object], name: str = "v", **tables: object) -> Path:
        """A volume file; `tables` are further tables: mount={"memory_limit": "64M"}."""
        lines = ["[volume]", f'name = "{self.name}"', f'state = "{self.state}"']
        for backend in backends:
            lines.append("[[backend]]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in backend.items()]
        cache = {"dir": str(self.cache), "size": "2G"}
        for table, values in {"cache": cache, **tables}.items():
            assert isinstance(values, Mapping)
            lines.append(f"[{table}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        path = self.root / f"{name}.toml"
        path.write_text("\n".join([*lines, ""]))
        return path

    def mountpoint(self, name: str = "mnt") -> Path:
        path = self.root / name
        path.mkdir(exist_ok=True)
        return path

    def reader(self) -> Reader:
        reader = Reader()
        self._readers.append(reader)
        return reader

    # -- running ---------------------------------------------------------------------------------

    def run(
        self, *words: object, prefix: Sequence[str] = (), check: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        """One `hsfs` command to its end; `check`: the exit code that it has to have."""
        began = time.monotonic()
        done = subprocess.run(
            [*prefix, str(BIN / "hsfs"), *(os.fsdecode(os.fspath(w)) for w in words)],  # type: ignore[call-overload]
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=COMMAND_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env=self.env,
            cwd=self.root,
        )
        if (elapsed := time.monotonic() - began) > SLOW_S:
            print(f"slow: {elapsed:.1f} s: {words}\n{done.stderr}\n{self.logs()}")
        if check is not None and done.returncode != check:
            raise AssertionError(
                f"{words}: exit {done.returncode}\n{done.stdout}{done.stderr}\n{self.logs()}"
            )
        return done

    def json(self, *words: object, check: int | None = 0) -> dict[str, Any]:
        """The JSON object of a verb."""
        value: dict[str, Any] = json.loads(self.run(*words, "--json", check=check).stdout)
        assert value["schema"] == 1
        return value

    def mount(
        self,
        volume: Path,
        mountpoint: Path,
        *words: str,
        check: int = 0,
        prefix: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        done = self.run("mount", volume, mountpoint, *words, check=check, prefix=prefix)
        self.note_pids()
        return done

    def umount(self, mountpoint: Path, *words: str) -> None:
        self.run("umount", mountpoint, *words)

    def refresh(self, path: Path) -> dict[str, Any]:
        return self.json("refresh", path)

    def status(self, mountpoint: Path) -> dict[str, Any]:
        """The mount's part of `status`; {} when it isn't there."""
        mounts = self.json("status", check=None)["mounts"]
        return next((m for m in mounts if m["mountpoint"] == str(mountpoint)), {})

    def states(self, mountpoint: Path) -> dict[str, str]:
        """Backend -> its state."""
        return {b["name"]: b["state"] for b in self.status(mountpoint).get("backends", [])}

    def stats(self, mountpoint: Path) -> dict[str, Any]:
        return self.json("stats", mountpoint)

    def info(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = self.json("info", path)["paths"][0]
        return found

    def seen(self, read: Callable[[], Answer], data: bytes, limit_s: float = PATIENCE_S) -> None:
        """Waits until `read` gives exactly `data`."""
        last: list[Answer] = []

        def right() -> bool:
            last[:] = [read()]
            return last[0].is_(data)

        eventually(right, lambda: f"{len(data)} bytes {data[:16].hex()}, but {last}", limit_s)

    # -- processes -------------------------------------------------------------------------------

    def mount_pid(self, mountpoint: Path) -> int:
        return int(self.status(mountpoint)["pid"])

    def mds_pid(self) -> int:
        return int((self.state / "mds.pid").read_text())

    def mover_pid(self) -> int:
        """Of the metadata server's own mover; 0 while there is none."""
        try:
            below = children(self.mds_pid())
        except (OSError, ValueError):
            return 0
        return below[0] if below else 0

    def note_pids(self) -> None:
        """Remember every process of ours, for the end."""
        for path in (self.root / "run").glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                self.pids.add(int(json.loads(path.read_text())["pid"]))
        with contextlib.suppress(OSError, ValueError):
            self.pids |= {self.mds_pid(), *children(self.mds_pid())}

    def mounted(self, mountpoint: Path) -> bool:
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        return any(line.split(" ")[4] == str(mountpoint) for line in text.splitlines())

    def logs(self, lines: int = 25) -> str:
        text = ""
        for path in sorted(self.state.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            text += f"--- {path}\n" + "\n".join(tail) + "\n"
        return text

    # -- the end ---------------------------------------------------------------------------------

    def clean(self) -> None:
        self.note_pids()
        places = [
            line.split(" ")[4]
            for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
            if line.split(" ")[4].startswith(f"{self.root}/")
        ]
        # Politely first: a mount that ends by itself is part of what is tested.
        for pid in self.pids:
            if self.ours(pid):
                _signal(pid, signal.SIGCONT)
                _signal(pid, signal.SIGTERM)
        for place in reversed(places):
            subprocess.run(["umount", "-l", place], check=False, timeout=30, capture_output=True)
        stubborn = [pid for pid in self.pids if self.ours(pid) and not end(pid)]
        for reader in self._readers:
            reader.close()
        shutil.rmtree(self.root, ignore_errors=True)
        assert not stubborn, "processes that SIGTERM does not end"

    def ours(self, pid: int) -> bool:
        """Whether the pid still is a process of hsfs: numbers are used again."""
        return any(word.startswith(b"hsfs.cli.") for word in _words(pid))


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end(pid: int, number: int = signal.SIGTERM, limit_s: float = 30.0) -> bool:
    """Signal a process and wait until it is gone, at last with SIGKILL; whether it went by the
    signal. A pid that is nobody's any more counts as gone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno == errno.ESRCH:
            return True
        raise
    try:
        for sent in (number, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, sent)
            if select.select([fd], [], [], limit_s)[0]:
                return sent == number
            print(f"process {pid} outlives signal {sent}: {_words(pid)!r}, its stacks:")
            command = [str(BIN / "py-spy"), "dump", "--nonblocking", "--pid", str(pid)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                print(subprocess.run(command, capture_output=True, timeout=60, check=False).stdout)
        return False
    finally:
        os.close(fd)


def _words(pid: int) -> list[bytes]:
    """The command line of a process; [] when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
