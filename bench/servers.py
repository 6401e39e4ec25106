"""The bench's servers: SeaweedFS and NFS-Ganesha behind a link whose rate the kernel can cap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.processes import tree
from tests.servers.ganesha import Ganesha
from tests.servers.netcap import CappedNet
from tests.servers.seaweedfs import SeaweedFS


class Capped:
    """Mixes in the cap of a server that stands behind a CappedNet."""

    net: CappedNet

    @contextmanager
    def capped(self, bytes_per_s: float) -> Iterator[None]:
        """The server's side sends at most that much while the block runs."""
        self.net.set_rate(bytes_per_s)
        try:
            yield
        finally:
            self.net.set_rate(0)


class S3(Capped):
    """SeaweedFS behind a link; any credentials are accepted."""

    def __init__(self, server: SeaweedFS, net: CappedNet) -> None:
        self.server, self.net = server, net
        self.endpoint = server.endpoint
        self.filer = server.filer

    @property
    def pids(self) -> list[int]:
        return tree(self.server.pid)

    def create_bucket(self, bucket: str) -> None:
        self.server.create_bucket(bucket)

    def upload(self, bucket: str, source: Path) -> int:
        """All files below a folder, under their relative paths; bytes."""
        files = (path for path in sorted(source.rglob("*")) if path.is_file())
        return self.server.put_many(bucket, ((str(f.relative_to(source)), f) for f in files))


@contextmanager
def s3_server(data: Path) -> Iterator[S3]:
    """A SeaweedFS with its data in `data`."""
    with CappedNet(0) as net, SeaweedFS(data, net=net) as server:
        yield S3(server, net)


class Nfs(Capped):
    """NFS-Ganesha behind a link."""

    def __init__(self, server: Ganesha, net: CappedNet) -> None:
        self.server, self.net = server, net
        self.url = server.url

    @property
    def pids(self) -> list[int]:
        return tree(self.server.pid)


@contextmanager
def nfs_server(export: Path) -> Iterator[Nfs]:
    """An NFS-Ganesha that exports a folder."""
    with CappedNet(0) as net, Ganesha(export, net=net) as server:
        yield Nfs(server, net)
