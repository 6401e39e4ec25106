"""The bench's world: real servers with data, a bandwidth cap, and hsfs mounted by its command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from bench.processes import tree

HSFS = str(Path(sys.executable).parent / "hsfs")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "anyany"}


@contextmanager
def workplace(need_bytes: int) -> Iterator[Path]:
    """A folder on a real disk (page cache and all, unlike tmpfs), removed afterwards."""
    base = Path(os.environ.get("HSFS_BENCH_DIR", "/var/tmp"))
    free = shutil.disk_usage(base).free
    if free < need_bytes:
        raise RuntimeError(f"{base} has {free >> 20} MiB free, {need_bytes >> 20} are needed")
    work = Path(tempfile.mkdtemp(prefix="hsfs-bench-", dir=base))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def hsfs(*arguments: str, check: bool = True) -> dict[str, object]:
    """Run a verb with `--json` and return its object."""
    done = subprocess.run(
        [HSFS, *arguments, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, **CREDENTIALS},
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"hsfs {' '.join(arguments)}: {done.stdout}{done.stderr}")
    answer: dict[str, object] = json.loads(done.stdout or "{}")
    return answer


class HsfsMount:
    """One mount made by `hsfs mount`, with state and cache in `work`."""

    def __init__(
        self,
        work: Path,
        backends: Sequence[str],
        *,
        cache_size: str = "12G",
        memory_limit: str = "512M",
    ) -> None:
        self.work = work
        self.mountpoint = work / "mnt"
        self.cache = work / "cache"
        for folder in (work, self.mountpoint, self.cache):
            folder.mkdir(parents=True, exist_ok=True)
        self.volume = work / "volume.toml"
        self.volume.write_text(
            f'[volume]\nname = "bench"\nstate = "{work / "state"}"\n'
            f'[cache]\ndir = "{self.cache}"\nsize = "{cache_size}"\n'
            f'[mount]\nmemory_limit = "{memory_limit}"\n' + "\n".join(backends)
        )
        self.pid = 0

    def __enter__(self) -> Self:
        subprocess.run(
            [HSFS, "mount", str(self.volume), str(self.mountpoint)],
            check=True,
            env={**os.environ, **CREDENTIALS},
            stdin=subprocess.DEVNULL,
            timeout=120,
        )
        self.pid = self.status()["pid"]
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run([HSFS, "umount", str(self.mountpoint)], check=False, timeout=120)
        for pid in self.mds_pids():
            os.kill(pid, 15)

    def status(self) -> dict[str, int]:
        mounts = hsfs("status", str(self.mountpoint))["mounts"]
        assert isinstance(mounts, list)
        status: dict[str, int] = mounts[0]
        return status

    @property
    def pids(self) -> list[int]:
        """The mount's process tree."""
        return tree(self.pid)

    def mds_pids(self) -> list[int]:
        """The embedded metadata server and its mover."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(b"mds_process" in w for w in words) and any(
                os.fsencode(self.work) in w for w in words
            ):
                found.append(int(folder.name))
        return found

    def wait_scanned(self, timeout_s: float = 600) -> None:
        """Until every full scan is done."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            answer = hsfs("backend", "list", str(self.volume))["backends"]
            assert isinstance(answer, list)
            if all(one.get("scan") in ("done", "lazy") for one in answer):
                return
            time.sleep(0.2)
        raise RuntimeError("the scan did not end")

    def evict(self, *paths: Path) -> None:
        """Nothing of these in Tier 0 nor in the page cache."""
        hsfs("evict", *(str(path) for path in paths or (self.mountpoint,)))

    def stats(self) -> dict[str, object]:
        return hsfs("stats", str(self.mountpoint))


def s3_backend(name: str, bucket: str, endpoint: str, **keys: str) -> str:
    """A [[backend]] table of a volume file."""
    lines = [
        "[[backend]]",
        f'name = "{name}"',
        f'url = "s3://{bucket}"',
        f'endpoint = "{endpoint}"',
        'region = "us-east-1"',
        *(f'{key} = "{value}"' for key, value in keys.items()),
    ]
    return "\n".join(lines) + "\n"


def url_backend(name: str, url: str, **keys: str) -> str:
    """A [[backend]] table of a volume file, by URL alone."""
    lines = ["[[backend]]", f'name = "{name}"', f'url = "{url}"']
    return "\n".join([*lines, *(f'{key} = "{value}"' for key, value in keys.items())]) + "\n"
