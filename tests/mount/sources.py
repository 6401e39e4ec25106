"""Places where a mount's bytes live, changed natively by tests: folders (local, or exported by a
server) and buckets."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path


def content(seed: object, size: int) -> bytes:
    """Incompressible bytes, the same for the same seed."""
    return random.Random(repr(seed)).randbytes(size)


class Folder:
    """A folder; `at` is where the mount shows it. Names are relative, with slashes."""

    keeps_inodes = True  # a native rename keeps the inode number

    def __init__(self, folder: Path, at: str) -> None:
        self.folder, self.at = folder, at
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def put(self, name: str, data: bytes) -> None:
        """Write in place: the same native file when it exists."""
        with open(self._path(name), "r+b" if self._path(name).exists() else "wb") as file:
            file.write(data)
            file.truncate()

    def replace(self, name: str, data: bytes) -> None:
        """Write beside, and rename over."""
        beside = self._path(name + ".new~")
        beside.write_bytes(data)
        os.replace(beside, self._path(name))

    def truncate(self, name: str, size: int) -> None:
        os.truncate(self._path(name), size)

    def delete(self, name: str) -> None:
        self._path(name).unlink()

    def rename(self, old: str, new: str) -> None:
        os.rename(self._path(old), self._path(new))

    def remove_tree(self, name: str) -> None:
        shutil.rmtree(self._path(name))

    def to_directory(self, name: str, inside: bytes) -> None:
        """A directory of that name with one file `inside`."""
        self.delete(name)
        self.put(f"{name}/inside", inside)


class Bucket:
    """A bucket of an S3 server (anything with `client` and `create_bucket`)."""

    keeps_inodes = False

    def __init__(self, server, bucket: str, at: str) -> None:
        self.bucket, self.at = bucket, at
        server.create_bucket(bucket)
        self.client = server.client()

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=name, Body=data)

    replace = put

    def get(self, name: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=name)["Body"].read()

    def truncate(self, name: str, size: int) -> None:
        self.put(name, self.get(name)[:size])

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=name)

    def rename(self, old: str, new: str) -> None:
        self.put(new, self.get(old))
        self.delete(old)

    def remove_tree(self, name: str) -> None:
        found = self.client.list_objects_v2(Bucket=self.bucket, Prefix=f"{name}/")
        for entry in found.get("Contents", []):
            self.delete(entry["Key"])

    def to_directory(self, name: str, inside: bytes) -> None:
        self.delete(name)
        self.put(f"{name}/inside", inside)

    def close(self) -> None:
        self.client.close()
