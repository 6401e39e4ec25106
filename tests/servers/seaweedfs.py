"""SeaweedFS with its S3 gateway on 127.0.0.1: a real object store in one process.

Good to know: it rewrites or refuses keys that are not canonical paths (odd names are proved on
moto); SIGTERM takes it 25 s, so it is ended by SIGKILL; every HTTP port has a gRPC port 10000
above.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers import s3_data
from tests.servers.process import START_LIMIT_S, Process, Server, executable, wait_stopped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.servers.netcap import CappedNet

ACCESS_KEY, SECRET_KEY = "hsfstest", "hsfstestsecret"


class SeaweedFS(Server):
    """One S3 server; `data_dir` holds its data (default: its own temporary folder).

        Any credentials are accepted unless `identities` maps access keys to secret keys: then only
    XX with the suffix ":ro" may read and list but not write.
    """

    def __init__(
        self,
        data_dir: os.PathLike[str] | str | None = None,
        *,
        identities: Mapping[str, str] | None = None,
        volumes: int = 60,
        volume_size_mib: int = 1024,
        net: CappedNet | None = None,
        extra_args: Sequence[str] = (),
    ) -> None:
        super().__init__("weed")
        self._data_dir = None if data_dir is None else Path(data_dir)
        self._identities = dict(identities or {})
        self._volumes, self._volume_size_mib = volumes, volume_size_mib
        self._extra_args = tuple(extra_args)
        self._enter = () if net is None else net.enter
        self.host = "127.0.0.1" if net is None else net.address
        self.port = self._port(pair=True)
        self._master, self._volume, self._filer = (self._port(pair=True) for _ in range(3))
        self.access_key, self.secret_key = ACCESS_KEY, SECRET_KEY
        if self._identities:
            name, self.secret_key = next(iter(self._identities.items()))
            self.access_key = name.removesuffix(":ro")
        self._process: Process | None = None

    @property
    def endpoint(self) -> str:
        """The S3 endpoint."""
        return f"http://{self.host}:{self.port}"

    @property
    def filer(self) -> str:
        """HOST:PORT of the filer, for `weed mount`."""
        return f"{self.host}:{self._filer}"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of the credentials and the endpoint, for clients."""
        return s3_data.environment(self.endpoint, self.access_key, self.secret_key)

    @property
    def pid(self) -> int:
        """The pid of the server, for signals."""
        assert self._process is not None, "not started"
        return self._process.pid

    def pause(self) -> None:
        """SIGSTOP, and returns when it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_stopped(self.pid)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; data and ports stay for `restart`."""
        self._halt()

    def restart(self) -> None:
        """Starts again on the same ports and data."""
        self._halt()
        self._launch()

    def create_bucket(self, bucket: str) -> None:
        """Makes a bucket (a name has at least three characters); one that exists is fine."""
        s3_data.create_bucket(self.endpoint, bucket, self.access_key, self.secret_key)

    def put_many(self, bucket: str, objects: Iterable[tuple[str, bytes | Path]]) -> int:
        """Puts many objects in parallel and gives their total size."""
        return s3_data.put_many(self.endpoint, bucket, objects, self.access_key, self.secret_key)

    def client(self) -> s3_data.Client:
        """A boto3 client of this server."""
        return s3_data.client(self.endpoint, self.access_key, self.secret_key)

    def _launch(self) -> None:
        data = self._data_dir or self.folder / "data"
        logs = self.folder / "logs"
        for folder in (data, logs):
            folder.mkdir(parents=True, exist_ok=True)
        arguments = [
            *(f"-logdir={logs}", "server", f"-ip={self.host}", f"-ip.bind={self.host}"),
            *(f"-dir={data}", "-filer", "-s3", f"-s3.port={self.port}"),
            *(f"-master.port={self._master}", f"-volume.port={self._volume}"),
            *(f"-filer.port={self._filer}", f"-filer.localSocket={self.folder}/filer.sock"),
            *(f"-volume.max={self._volumes}", "-volume.minFreeSpace=1"),
            f"-master.volumeSizeLimitMB={self._volume_size_mib}",
            # A master that was killed waits for an election, by default 10 s.
            *("-master.electionTimeout=1s", "-master.telemetry=false", "-s3.iam=false"),
            # Both would listen on fixed ports.
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
            *self._extra_args,
        ]
        if self._identities:
            config = self.folder / "s3.json"
            config.write_text(json.dumps(_identities(self._identities)))
            arguments.append(f"-s3.config={config}")
        self._process = Process(
            [*self._enter, executable("weed"), *arguments],
            log=self.folder / "out",
            # Its sockets go to TMPDIR, if anywhere; HOME keeps a user's own configuration out.
            env={"HOME": str(self.folder), "TMPDIR": str(self.folder)},
            cwd=self.folder,
        )
        self._process.wait_until(self._answers, what="weed", limit_s=START_LIMIT_S)

    def _answers(self) -> bool:
        # The gateway listens before it has a volume to write to: a stored object says that all is
        # up.
        return s3_data.answers(self.endpoint, self.access_key, self.secret_key) and self._stores()

    def _stores(self) -> bool:
        """Whether the master can hand out a place for new data."""
        try:
            with socket.create_connection((self.host, self._master), timeout=5) as s:
                s.sendall(b"GET /dir/assign HTTP/1.0\r\nHost: x\r\n\r\n")
                reply = b""
                while more := s.recv(4096):
                    reply += more
        except OSError:
            return False
        return b'"fid"' in reply

    def _halt(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop(signal.SIGKILL)
        # It makes these beside the ones that it was told to make.
        for port in (self.port, self._master, self._volume, self._filer):
            for name in ("master", "volume", "filer", "s3"):
                Path(f"/tmp/seaweedfs-{name}-{port}.sock").unlink(missing_ok=True)
                Path(f"/tmp/seaweedfs-{name}-grpc-{port + 10000}.sock").unlink(missing_ok=True)


def _identities(keys: Mapping[str, str]) -> dict[str, object]:
    return {
        "identities": [
            {
                "name": key,
                "credentials": [{"accessKey": key.removesuffix(":ro"), "secretKey": secret}],
                "actions": ["Read", "List"] if key.endswith(":ro") else ["Admin"],
            }
            for key, secret in keys.items()
        ]
    }
