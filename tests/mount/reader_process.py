"""A program that reads files, for tests: one JSON order a line in, one answer out.

In a process of its own: a read that hangs, or a mapping that dies of SIGBUS, takes nobody with it,
and whoever waits for it can give up. Standard library only.
"""

import errno
import hashlib
import json
import mmap
import os
import sys

PIECE = 1 << 20


class Handles:
    """Files and mappings by the name that the test gave them."""

    def __init__(self):
        self.files = {}
        self.maps = {}

    def open(self, path, name):
        self.files[name] = os.open(path, os.O_RDONLY)
        return os.fstat(self.files[name]).st_size

    def pread(self, name, offset, size):
        return described(pieces(self.files[name], offset, size))

    def close(self, name):
        view = self.maps.pop(name, None)
        if view is not None:
            view.close()
        os.close(self.files.pop(name))

    def map(self, name):
        handle = self.files[name]
        self.maps[name] = mmap.mmap(handle, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        return len(self.maps[name])

    def peek(self, name, offset, size):
        """Bytes of a mapping, touched by a child: SIGBUS is an answer."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.write(
                writer, json.dumps(described([self.maps[name][offset : offset + size]])).encode()
            )
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as file:
            answer = file.read()
        if os.waitpid(child, 0)[1]:
            return {"errno": "SIGBUS"}
        return json.loads(answer)

    def read(self, path):
        """A whole file through a handle of its own, and its size as fstat says it."""
        handle = os.open(path, os.O_RDONLY)
        try:
            return described(pieces(handle, 0, None))
        finally:
            os.close(handle)

    def stat(self, path):
        found = os.lstat(path)
        return {"ino": found.st_ino, "size": found.st_size, "mode": found.st_mode}

    def list(self, path):
        return sorted(os.listdir(path))

    def readlink(self, path):
        return os.readlink(path)

    def statvfs(self, path):
        return os.statvfs(path).f_blocks


def pieces(handle, offset, size):
    """Up to `size` bytes (None = to the end)."""
    while size is None or size:
        data = os.pread(handle, PIECE if size is None else min(size, PIECE), offset)
        if not data:
            return
        yield data
        offset += len(data)
        if size is not None:
            size -= len(data)


def described(parts):
    state, size, first, zeros = hashlib.blake2b(digest_size=16), 0, b"", True
    for part in parts:
        state.update(part)
        size += len(part)
        first = first or part[:16]
        zeros = zeros and not part.strip(b"\0")
    return {"size": size, "digest": state.hexdigest(), "first": first.hex(), "zeros": zeros}


def main():
    handles = Handles()
    for line in sys.stdin:
        order = json.loads(line)
        what = order.pop("do")
        try:
            answer = {"ok": getattr(handles, what)(**order)}
        except OSError as error:
            answer = {"ok": {"errno": errno.errorcode.get(error.errno, str(error.errno))}}
        except Exception as error:
            answer = {"error": repr(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
