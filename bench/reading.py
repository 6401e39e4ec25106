"""Readers: what an application does to the mount, and how caches are emptied between turns."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

READ_SIZE = 1024 * 1024


def read_through(path: Path | str) -> int:
    """Read a file sequentially with 1 MiB reads into one buffer; bytes read."""
    buf = mmap.mmap(-1, READ_SIZE)
    fd = os.open(path, os.O_RDONLY)
    total = 0
    try:
        while n := os.readv(fd, [buf]):
            total += n
    finally:
        os.close(fd)
    return total


def forget_pages(paths: Iterable[Path | str]) -> None:
    """Drop the kernel's page cache of these files (clean pages only)."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def drop_page_cache() -> None:
    """Write everything back, then drop the page cache of the machine (not dentries, inodes)."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1\n")


_SMALL = """
import os, sys
root, names = sys.argv[1], sys.stdin.buffer.read().split(b"\\0")
total = 0
for name in names:
    path = os.path.join(os.fsencode(root), name)
    os.stat(path)
    fd = os.open(path, os.O_RDONLY)
    while data := os.read(fd, 1 << 20):
        total += len(data)
    os.close(fd)
print(total)
"""


def read_small(root: Path, names: list[bytes], processes: int = 1) -> int:
    """stat, open, read to the end and close every file, in `processes` readers; bytes read."""
    shares = [names[i::processes] for i in range(processes)]
    readers: list[subprocess.Popen[bytes]] = []
    for share in shares:
        reader = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SMALL, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert reader.stdin is not None
        reader.stdin.write(b"\0".join(share))
        reader.stdin.close()
        readers.append(reader)
    total = 0
    for reader in readers:
        assert reader.stdout is not None
        total += int(reader.stdout.read())
        if reader.wait() != 0:
            raise RuntimeError(f"a reader of {root} failed")
    return total
