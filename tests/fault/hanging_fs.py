"""A FUSE file system of one file that stops answering while a given path exists.

    hanging_fs.py MOUNTPOINT CONTROL

It stands for a kernel mount whose server has gone. Prints "ready" when it is mounted.
"""

import errno
import os
import stat
import sys

import pyfuse3
import trio

CONTENT = b"hanging " * 1000
FILE = pyfuse3.InodeT(2)


class Hanging(pyfuse3.Operations):
    """Everything waits for ever once the control file is there; what waits never ends."""

    def __init__(self, control):
        super().__init__()
        self._control = control

    def _stopped(self):
        return os.path.exists(self._control)

    async def _answer(self):
        if self._stopped():
            await trio.sleep_forever()

    def _attributes(self, inode):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        directory = inode == pyfuse3.ROOT_INODE
        entry.st_mode = (stat.S_IFDIR | 0o755) if directory else (stat.S_IFREG | 0o644)
        entry.st_nlink = 2 if directory else 1
        entry.st_size = 0 if directory else len(CONTENT)
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = 10**18
        # Nothing may be answered from the kernel's caches.
        entry.entry_timeout = entry.attr_timeout = 0
        return entry

    async def getattr(self, inode, ctx):
        await self._answer()
        return self._attributes(inode)

    async def lookup(self, parent_inode, name, ctx):
        await self._answer()
        if name != b"file":
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(FILE)

    async def opendir(self, inode, ctx):
        await self._answer()
        return pyfuse3.FileHandleT(inode)

    async def readdir(self, fh, start_id, token):
        await self._answer()
        if start_id == 0:
            pyfuse3.readdir_reply(token, b"file", self._attributes(FILE), 1)

    async def open(self, inode, flags, ctx):
        await self._answer()
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), direct_io=True)

    async def read(self, fh, off, size):
        await self._answer()
        return CONTENT[off : off + size]


def main():
    mountpoint, control = sys.argv[1:]
    pyfuse3.init(Hanging(control), mountpoint, {*pyfuse3.default_options, "fsname=hanging"})
    print("ready", flush=True)
    trio.run(pyfuse3.main)


if __name__ == "__main__":
    main()
