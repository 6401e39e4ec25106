"""Changes a directory with the operating system's own calls: the native side of file and NFS."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class NativeTree:
    """A `HierarchicalTree` (backend_suite) over a directory of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = os.fsencode(root)

    def path(self, key: bytes) -> bytes:
        """Where a key lies."""
        return os.path.join(self.root, key)

    def write(self, key: bytes, data: bytes) -> None:
        path = self.path(key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)

    def remove(self, key: bytes) -> None:
        path = self.path(key)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def mkdir(self, key: bytes) -> None:
        os.makedirs(self.path(key), exist_ok=True)

    def symlink(self, key: bytes, target: bytes) -> None:
        path = self.path(key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)

    def rename(self, old: bytes, new: bytes) -> None:
        os.rename(self.path(old), self.path(new))
