"""`rclone serve s3`: a poor S3 server. It answers a range with 200 and Content-Range, and ignores
If-Match and If-None-Match. Buckets are the folders of `data_dir`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers import s3_data
from tests.servers.process import Process, Server, executable

if TYPE_CHECKING:
    from collections.abc import Iterable


class RcloneS3(Server):
    """One S3 server over a local folder (default: its own temporary one)."""

    access_key, secret_key = "rclonetest", "rclonetestsecret"

    def __init__(self, data_dir: os.PathLike[str] | str | None = None) -> None:
        super().__init__("rclone")
        self.data_dir = self.folder / "data" if data_dir is None else Path(data_dir)
        self.port = self._port()
        self._process: Process | None = None

    @property
    def endpoint(self) -> str:
        """The S3 endpoint."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of the credentials and the endpoint, for clients."""
        return s3_data.environment(self.endpoint, self.access_key, self.secret_key)

    @property
    def pid(self) -> int:
        """The pid of the server, for signals."""
        assert self._process is not None, "not started"
        return self._process.pid

    def create_bucket(self, bucket: str) -> None:
        """Makes a bucket."""
        (self.data_dir / bucket).mkdir(exist_ok=True)

    def put_many(self, bucket: str, objects: Iterable[tuple[str, bytes | Path]]) -> int:
        """Puts many objects in parallel and gives their total size."""
        return s3_data.put_many(
            self.endpoint, bucket, objects, self.access_key, self.secret_key, concurrency=4
        )

    def client(self) -> s3_data.Client:
        """A boto3 client of this server."""
        return s3_data.client(self.endpoint, self.access_key, self.secret_key)

    def _launch(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._process = Process(
            [
                *(executable("rclone"), "serve", "s3", str(self.data_dir)),
                *("--addr", f"127.0.0.1:{self.port}"),
                *("--auth-key", f"{self.access_key},{self.secret_key}"),
                # Folders that change behind its back show at once.
                *("--dir-cache-time", "0s", "--vfs-cache-mode", "off"),
                *("--config", str(self.folder / "rclone.conf")),
                *("--cache-dir", str(self.folder / "cache")),
            ],
            log=self.folder / "out",
            env={"HOME": str(self.folder), "TMPDIR": str(self.folder)},
            cwd=self.folder,
        )
        self._process.wait_until(
            lambda: s3_data.answers(self.endpoint, self.access_key, self.secret_key), what="rclone"
        )

    def _halt(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop(signal.SIGKILL)
