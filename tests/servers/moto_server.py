"""moto's S3 server: keeps keys as they are (empty segments, dots, control characters; only a key
with a newline answers 404), enforces conditional requests and has versioning. Slow, in memory, one
process."""

from __future__ import annotations

import signal
import sys
import urllib.request
from typing import TYPE_CHECKING

from tests.servers import s3_data
from tests.servers.process import Process, Server

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class Moto(Server):
    """One S3 server; any credentials are accepted."""

    access_key, secret_key = "mototest", "mototestsecret"

    def __init__(self) -> None:
        super().__init__("moto")
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
        """Makes a bucket; one that exists is fine."""
        s3_data.create_bucket(self.endpoint, bucket, self.access_key, self.secret_key)

    def put_many(self, bucket: str, objects: Iterable[tuple[str, bytes | Path]]) -> int:
        """Puts many objects with plain keys in parallel and gives their total size."""
        return s3_data.put_many(
            self.endpoint, bucket, objects, self.access_key, self.secret_key, concurrency=4
        )

    def client(self) -> s3_data.Client:
        """A boto3 client of this server, for odd keys."""
        return s3_data.client(self.endpoint, self.access_key, self.secret_key)

    def reset(self) -> None:
        """Forgets all buckets."""
        request = urllib.request.Request(f"{self.endpoint}/moto-api/reset", method="POST")
        with urllib.request.urlopen(request, timeout=60) as reply:
            reply.read()

    def _launch(self) -> None:
        self._process = Process(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            log=self.folder / "out",
            env={"TMPDIR": str(self.folder), "PYTHONWARNINGS": "ignore"},
            cwd=self.folder,
        )
        self._process.wait_until(
            lambda: s3_data.answers(self.endpoint, self.access_key, self.secret_key), what="moto"
        )

    def _halt(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop(signal.SIGKILL)
