"""The portable FUSE session, by pyfuse3 and libfuse: converts between kernel and Vfs, nothing else.

One nodeid (which pyfuse3 makes the same number as st_ino) with one generation is one content
version of one inode. When a file's content changed while the kernel knows the inode, LOOKUP and
READDIRPLUS give the same nodeid with the next generation: the kernel then makes a fresh inode and
marks the old one bad, so that handles and mappings of the old content get EIO (their close too),
never bytes of the new one. Until it has looked up again, OPEN and GETATTR of a nodeid whose content
moved on answer ESTALE, which the kernel turns into that lookup by itself. Hence pages that the
kernel holds always belong to the version that is being opened, and are always kept. READs of an old
handle that reach us are served from Tier 0 where it holds that version, else answer ESTALE.

Needs Linux 5.14 (generation checked on lookup). Not possible with pyfuse3: FUSE_INTERRUPT (a reader
that is killed is released by its own READ, at the latest by the backend's deadline), passthrough,
and locks of other than kernel-local scope.

The mount is read-only: every change answers EROFS. How requests are driven: `serving`.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, StatvfsData

from hsfs.core.errors import (
    HsfsError,
    Interrupted,
    NoAttribute,
    NotFound,
    NotSupported,
    StaleHandle,
    StaleVersion,
    Unavailable,
)
from hsfs.core.types import FileType, Ino, Name, Node
from hsfs.fuse.heap import give_back, keep_reply_buffers
from hsfs.fuse.notify import Notifier
from hsfs.fuse.options import MountOptions
from hsfs.fuse.serving import Latch, Loop, Resume, Serving, next_request, suspended
from hsfs.vfs.attrs import PREFIX
from hsfs.vfs.filesystem import Vfs
from hsfs.vfs.names import NamesPage

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_FORMAT = {
    FileType.FILE: stat.S_IFREG,
    FileType.DIRECTORY: stat.S_IFDIR,
    FileType.SYMLINK: stat.S_IFLNK,
    FileType.FIFO: stat.S_IFIFO,
    FileType.SOCKET: stat.S_IFSOCK,
    FileType.CHARACTER: stat.S_IFCHR,
    FileType.BLOCK: stat.S_IFBLK,
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND | os.O_CREAT
# Everyday answers; anything else is worth a line in the log.
_QUIET = (NotFound, NoAttribute, StaleHandle, StaleVersion, Interrupted)
_HIDDEN_INO = 1 << 63  # `.hsfs`, then its files
_HIDDEN_NAME = b".hsfs"
_COOKIE_BITS = 12
_IDLE_S = 8.0


def replying(
    handler: Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]]:
    """Lets nothing but FUSEError leave a handler."""
    name = handler.__name__

    @functools.wraps(handler)
    async def wrapped(self: Operations, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(self, *args, **kwargs)
        except FUSEError:
            raise
        except Exception as error:
            raise FUSEError(self.failed(name, error)) from error

    return cast("Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]]", wrapped)


class _Directory:
    """An open directory: the page that is being read and the names behind which pages begin, so
    that a cookie (page number and place in it) can be found again."""

    __slots__ = ("afters", "ino", "number", "page")

    def __init__(self, ino: int) -> None:
        self.ino = ino
        self.afters: list[bytes] = [b""]
        self.number = -1
        self.page: NamesPage | None = None


class Operations(pyfuse3.Operations):
    """Handlers. Fast paths first; what has to wait goes to the event loop by `_ask`."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(
        self, vfs: Vfs, options: MountOptions, token: trio.lowlevel.TrioToken, nursery: trio.Nursery
    ) -> None:
        super().__init__()
        self._vfs = vfs
        self._names = vfs.names
        self._attrs = vfs.attrs
        self._files = vfs.files
        self._inodes = vfs.inodes
        self._ops = vfs.counters.ops
        self._token = token
        self._nursery = nursery
        self._directories: dict[int, _Directory] = {}
        self._texts: dict[int, bytes] = {}
        self._next = itertools.count(1 << 32)  # apart from the handles of files
        self._mounted_ns = time.time_ns()
        self._hidden: tuple[tuple[bytes, Callable[[], bytes]], ...] = (
            (b"stats", self._stats_text),
            (b"config", lambda: options.config),
        )
        self._read_only_told = False
        self._told: dict[tuple[str, int], tuple[float, int]] = {}
        self.in_flight: Callable[[], int] = lambda: 0

    # -- the loop --------------------------------------------------------------------------------

    async def _ask(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run an async function on the event loop and wait for it here."""

        def register(resume: Resume) -> None:
            try:
                self._token.run_sync_soon(self._start, function, args, resume)
            except trio.RunFinishedError:
                resume(Interrupted("", "the mount is ending"))

        result: T = await suspended(register)
        return result

    def _start(
        self, function: Callable[..., Awaitable[object]], args: Sequence[object], resume: Resume
    ) -> None:
        try:
            self._nursery.start_soon(self._task, function, args, resume)
        except RuntimeError:  # the nursery is closed
            resume(Interrupted("", "the mount is ending"))

    async def _task(
        self, function: Callable[..., Awaitable[object]], args: Sequence[object], resume: Resume
    ) -> None:
        outcome: object
        try:
            outcome = await function(*args)
        except Exception as error:
            outcome = error
        resume(outcome)

    def failed(self, operation: str, error: Exception) -> int:
        """The errno for an error that ends an operation; logged here and nowhere else."""
        self._vfs.counters.errors[type(error).__name__] += 1
        if not isinstance(error, HsfsError):
            log.error("%s failed", operation, exc_info=error)
            return errno.EIO
        if isinstance(error, _QUIET):
            log.debug("%s: %s", operation, error)
            # An inode that is gone (a missing name is not an error here) says nothing of the name
            # that led to it: there may be another file by now. ESTALE makes the kernel look it up.
            return errno.ESTALE if isinstance(error, NotFound) else error.errno
        key, now = (operation, error.errno), time.monotonic()
        since, count = self._told.get(key, (-1.0, 0))
        if now - since < 1.0:
            self._told[key] = (since, count + 1)
        else:
            self._told[key] = (now, 0)
            more = f" ({count} more like it)" if count else ""
            log.warning("%s: %s: %s%s", operation, error.code, error.why or error, more)
        return error.errno

    # -- names and attributes --------------------------------------------------------------------

    def _fill(self, node: Node, timeout_s: float, generation: int = 0) -> EntryAttributes:
        attributes = node.attributes
        entry = EntryAttributes()
        entry.st_ino = pyfuse3.InodeT(attributes.ino)
        entry.generation = generation
        entry.entry_timeout = entry.attr_timeout = timeout_s
        entry.st_mode = pyfuse3.ModeT(_FORMAT[attributes.type] | attributes.mode)
        entry.st_nlink = attributes.nlink
        entry.st_uid = attributes.uid
        entry.st_gid = attributes.gid
        entry.st_rdev = attributes.rdev
        entry.st_size = size = attributes.size
        entry.st_blocks = (size + 511) >> 9
        entry.st_atime_ns = attributes.atime_ns
        entry.st_mtime_ns = attributes.mtime_ns
        entry.st_ctime_ns = attributes.ctime_ns
        return entry

    def _enter(self, node: Node) -> EntryAttributes:
        """An entry reply: the kernel holds one more reference."""
        timeout_s = self._inodes.remaining(node.attributes.ino)
        return self._fill(node, timeout_s, self._inodes.enter(node))

    def _absent(self, timeout_s: float) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = pyfuse3.InodeT(0)
        entry.entry_timeout = entry.attr_timeout = timeout_s
        return entry

    @replying
    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        self._ops["lookup"] += 1
        if parent_inode >= _HIDDEN_INO or (parent_inode == 1 and name == _HIDDEN_NAME):
            return self._lookup_hidden(parent_inode, name)
        parent, segment = Ino(parent_inode), Name(name)
        try:
            node = self._names.lookup_now(parent, segment)
            if node is None:
                node = await self._ask(self._names.lookup, parent, segment)
        except NotFound:
            return self._absent(self._inodes.absent_for(parent, segment))
        return self._enter(node)

    @replying
    async def getattr(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        self._ops["getattr"] += 1
        if inode >= _HIDDEN_INO:
            return self._hidden_attributes(inode)
        ino = Ino(inode)
        node = self._attrs.getattr_now(ino)
        if node is None:
            node = await self._ask(self._attrs.getattr, ino)
        return self._fill(node, self._inodes.remaining(ino))

    @replying
    async def readlink(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileNameT:
        self._ops["readlink"] += 1
        node = self._names.node_now(Ino(inode))
        if node is None:
            node = await self._ask(self._names.node, Ino(inode))
        return pyfuse3.FileNameT(node.target)

    @replying
    async def statfs(self, ctx: pyfuse3.RequestContext) -> StatvfsData:
        self._ops["statfs"] += 1
        space = await self._ask(self._attrs.space)
        data = StatvfsData()
        data.f_bsize = data.f_frsize = unit = 4096
        data.f_blocks = space.total // unit
        data.f_bfree = space.free // unit
        data.f_bavail = space.available // unit
        data.f_files = space.files
        data.f_ffree = data.f_favail = space.files_free
        data.f_namemax = 255
        return data

    @replying
    async def getxattr(
        self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext
    ) -> bytes:
        self._ops["getxattr"] += 1
        if not name.startswith(PREFIX) or inode >= _HIDDEN_INO:
            raise FUSEError(errno.ENODATA)
        return await self._ask(self._attrs.xattr, Ino(inode), name)

    @replying
    async def listxattr(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> Sequence[pyfuse3.XAttrNameT]:
        # Listed, they would be copied by every cp -a and rsync -X.
        self._ops["listxattr"] += 1
        return ()

    # -- directories -----------------------------------------------------------------------------

    @replying
    async def opendir(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileHandleT:
        self._ops["opendir"] += 1
        fh = next(self._next)
        self._directories[fh] = _Directory(inode)
        return pyfuse3.FileHandleT(fh)

    @replying
    async def readdir(
        self, fh: pyfuse3.FileHandleT, start_id: int, token: pyfuse3.ReaddirToken
    ) -> None:
        self._ops["readdir"] += 1
        directory = self._directories.get(fh)
        if directory is None:
            raise StaleHandle("", "no such handle")
        if directory.ino >= _HIDDEN_INO:
            self._read_hidden(start_id, token)
            return
        if not start_id:
            directory.number = -1
            del directory.afters[1:]
        if start_id < 2 and not await self._dots(directory, start_id, token):
            return
        number, index = (0, 0) if start_id <= 2 else _place(start_id)
        reply = pyfuse3.readdir_reply
        while True:
            page = await self._page(directory, number)
            if page is None:
                return
            names, nodes = page.names, page.nodes
            base = (number + 1) << _COOKIE_BITS
            while index < len(names):
                node = nodes[index]
                index += 1
                entry = self._enter(node)
                if not reply(token, pyfuse3.FileNameT(names[index - 1]), entry, base | index):
                    self._inodes.forget(((node.attributes.ino, 1),))
                    return
            if not page.more or not names:
                return
            number, index = number + 1, 0

    async def _dots(
        self, directory: _Directory, start_id: int, token: pyfuse3.ReaddirToken
    ) -> bool:
        """`.` and `..`: entries that do not count as lookups."""
        node = self._names.node_now(Ino(directory.ino))
        if node is None:
            node = await self._ask(self._names.node, Ino(directory.ino))
        if start_id < 1 and not pyfuse3.readdir_reply(
            token, pyfuse3.FileNameT(b"."), self._fill(node, 0.0), 1
        ):
            return False
        above = self._fill(node, 0.0)
        above.st_ino = pyfuse3.InodeT(node.parent or directory.ino)
        return pyfuse3.readdir_reply(token, pyfuse3.FileNameT(b".."), above, 2)

    async def _page(self, directory: _Directory, number: int) -> NamesPage | None:
        """Page `number` of an open directory; None for a cookie that was never given."""
        if number == directory.number:
            return directory.page
        if number >= len(directory.afters):
            return None
        after, ino = directory.afters[number], Ino(directory.ino)
        page = self._names.page_now(ino, after)
        if page is None:
            page = await self._ask(self._names.page, ino, after)
        directory.number, directory.page = number, page
        if page.names and page.more and len(directory.afters) == number + 1:
            directory.afters.append(page.names[-1])
        return page

    @replying
    async def releasedir(self, fh: pyfuse3.FileHandleT) -> None:
        self._directories.pop(fh, None)

    @replying
    async def fsyncdir(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        return

    # -- files -----------------------------------------------------------------------------------

    @replying
    async def open(
        self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext
    ) -> FileInfo:
        self._ops["open"] += 1
        if flags & _WRITING:
            self._refuse()
        if inode >= _HIDDEN_INO:
            return self._open_hidden(inode)
        ino = Ino(inode)
        opened = self._files.open_now(ino)
        if opened is None:
            opened = await self._ask(self._files.open, ino)
        return FileInfo(fh=pyfuse3.FileHandleT(opened.fh), keep_cache=opened.keep)

    @replying
    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        text = self._texts.get(fh)
        if text is not None:
            return text[off : off + size]
        latch = Latch()
        data = self._files.read(fh, off, size, latch)
        if data is None:
            data = await suspended(latch.attach)
        return data  # type: ignore[return-value]  # any buffer will do

    @replying
    async def release(self, fh: pyfuse3.FileHandleT) -> None:
        if self._texts.pop(fh, None) is None:
            self._files.release(fh)

    async def flush(self, fh: pyfuse3.FileHandleT) -> None:
        raise FUSEError(errno.ENOSYS)  # the kernel does not ask again

    @replying
    async def fsync(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        return

    # -- changes: none ---------------------------------------------------------------------------

    def _refuse(self) -> NoReturn:
        if not self._read_only_told:
            self._read_only_told = True
            log.warning(
                "a change was refused (EROFS): mounts are read-only until writing is supported; "
                "this is said once"
            )
        raise FUSEError(errno.EROFS)

    async def _refuse_change(self, *_: object) -> NoReturn:
        self._ops["refused"] += 1
        self._refuse()

    _refused: Any = _refuse_change
    create = mkdir = mknod = symlink = link = unlink = rmdir = rename = _refused
    setattr = write = setxattr = removexattr = _refused

    # -- .hsfs -----------------------------------------------------------------------------------

    def _stats_text(self) -> bytes:
        stats = self._vfs.stats()
        stats["in_flight"] = self.in_flight()
        return json.dumps(stats, indent=1, sort_keys=True).encode() + b"\n"

    def _hidden_attributes(self, inode: int) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = pyfuse3.InodeT(inode)
        entry.entry_timeout, entry.attr_timeout = 60.0, 0.0
        entry.st_uid, entry.st_gid = os.geteuid(), os.getegid()
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = self._mounted_ns
        if inode == _HIDDEN_INO:
            entry.st_mode = pyfuse3.ModeT(stat.S_IFDIR | 0o555)
        elif inode - _HIDDEN_INO <= len(self._hidden):
            entry.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o444)
            entry.st_size = len(self._hidden[inode - _HIDDEN_INO - 1][1]())
        else:
            raise FUSEError(errno.ENOENT)
        return entry

    def _lookup_hidden(self, parent: int, name: bytes) -> EntryAttributes:
        if parent == 1:
            return self._hidden_attributes(_HIDDEN_INO)
        for number, (known, _) in enumerate(self._hidden, start=1):
            if name == known:
                return self._hidden_attributes(_HIDDEN_INO + number)
        return self._absent(60.0)

    def _open_hidden(self, inode: int) -> FileInfo:
        number = inode - _HIDDEN_INO
        if not 1 <= number <= len(self._hidden):
            raise FUSEError(errno.EISDIR)
        fh = next(self._next)
        self._texts[fh] = self._hidden[number - 1][1]()
        return FileInfo(fh=pyfuse3.FileHandleT(fh), direct_io=True, keep_cache=False)

    def _read_hidden(self, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        for number, (name, _) in enumerate(self._hidden, start=1):
            if number > start_id:
                entry = self._hidden_attributes(_HIDDEN_INO + number)
                if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), entry, number):
                    return

    def _forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """pyfuse3 calls forget inside its receive function; nothing may leave it."""
        try:
            self._inodes.forget(inode_list)
        except Exception:
            log.exception("forget failed")


# pyfuse3's C code calls `operations.forget(...)` without awaiting and stores what it returns as the
# coroutine to run, so a plain function that returns None is both allowed and cheaper.
Operations.forget = Operations._forget  # type: ignore[method-assign, assignment]


def _place(cookie: int) -> tuple[int, int]:
    return (cookie >> _COOKIE_BITS) - 1, cookie & ((1 << _COOKIE_BITS) - 1)


async def serve(
    vfs: Vfs,
    mountpoint: str | os.PathLike[str],
    options: MountOptions,
    *,
    ready: Callable[[], None],
    grace_s: float = 5.0,
) -> None:
    """Mount `vfs` and serve it until somebody unmounts it or this is cancelled; unmounted in either
    case when it returns, within `grace_s` even while a backend hangs. `ready` is called once
    requests are being answered. One mount per process. Raises Unavailable when the kernel or
    fusermount3 refuses the mount (libfuse says why on stderr), NotSupported for an unknown pyfuse3.
    """
    _check_pyfuse3()
    path = _absolute(mountpoint)
    token = trio.lowlevel.current_trio_token()
    ended = trio.Event()

    def end() -> None:
        try:
            token.run_sync_soon(ended.set)
        except trio.RunFinishedError:
            log.debug("the event loop ended first")

    async with trio.open_nursery() as nursery:
        operations = Operations(vfs, options, token, nursery)
        before = _fuse_fds()
        try:
            pyfuse3.init(operations, path, _mount_options(options))
        except RuntimeError as error:
            raise Unavailable(path, f"mounting failed: {error}") from error
        notifier = Notifier(_tell)
        with _DrivenByHand():
            serving = Serving(_new_fd(before), _session_loop, end)
            operations.in_flight = lambda: serving.in_flight
            try:
                keep_reply_buffers()
                await nursery.start(vfs.run, notifier.put)
                nursery.start_soon(_rest_when_idle, vfs)
                serving.start()
                nursery.start_soon(_read_ahead_raised, serving, path, options.read_ahead)
                ready()
                await ended.wait()
            finally:
                vfs.close()
                _finish(path, serving, notifier, grace_s)
        nursery.cancel_scope.cancel()


async def _rest_when_idle(vfs: Vfs) -> None:
    """Give memory back after a burst, once nobody has asked for anything for a while."""
    before, busy = vfs.activity(), False
    while True:
        await trio.sleep(_IDLE_S)
        now = vfs.activity()
        if now != before:
            before, busy = now, True
            continue
        tidied = await trio.to_thread.run_sync(vfs.tidy, abandon_on_cancel=True)
        if busy or tidied:
            busy = False
            await trio.to_thread.run_sync(give_back, abandon_on_cancel=True)


def _absolute(mountpoint: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(mountpoint))


def _finish(path: str, serving: Serving, notifier: Notifier, grace_s: float) -> None:
    quiet = serving.close(grace_s / 4)
    quiet = notifier.close(0.2 if quiet else 0.0) and quiet
    if not quiet:
        # A thread is stuck in the kernel behind a request that will not be answered any more.
        _abort_connection(path)
        quiet = serving.close(grace_s / 4)
        quiet = notifier.close(grace_s / 4) and quiet
    if quiet:
        pyfuse3.close(unmount=True)
    else:
        log.warning("a thread did not leave the session: unmounting without it")
        _detach(path)


def _detach(path: str) -> None:
    command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-q", "-z"]
    os.posix_spawnp(command[0], [*command, "--", path], os.environ)


def _tell(ino: int, name: bytes) -> None:
    if name:
        with suppress(FileNotFoundError):
            pyfuse3.invalidate_entry(pyfuse3.InodeT(ino), pyfuse3.FileNameT(name))
    pyfuse3.invalidate_inode(pyfuse3.InodeT(ino), attr_only=True)


def _mount_options(options: MountOptions) -> set[str]:
    fsname = options.fsname.encode("ascii", "replace").decode().replace("\\", "\\\\")
    wanted = {f"fsname={fsname}".replace(",", "\\,"), f"subtype={options.subtype}", *options.extra}
    if options.allow_other:
        wanted.add("allow_other")
    if options.default_permissions:
        wanted.add("default_permissions")
    return wanted


# -- pyfuse3 by hand -----------------------------------------------------------------------------


def _check_pyfuse3() -> None:
    for name in ("_session_loop", "_wait_fuse_readable", "trio"):
        if not hasattr(pyfuse3, name):
            raise NotSupported(
                f"pyfuse3 {pyfuse3.__version__}",
                f"it has no {name}",
                "install a version that this hsfs was tested with (3.4 or 3.5)",
            )


def _session_loop() -> Loop:
    # At most INT_MIN tasks, so that it never starts one by itself. 0 is not enough: each loop that
    # ends counts one down, and the next one would be started in a nursery that is not there, in
    # place of answering the request that was just received.
    loop: Loop = pyfuse3._session_loop(None, 1, -(2**31))  # type: ignore[attr-defined]
    return loop


class _DrivenByHand:
    """Replaces, for the time of a session, what pyfuse3's session loop takes from trio: the wait
    for the next request (its own asyncio support replaces the same names)."""

    def __enter__(self) -> None:
        task = SimpleNamespace(name="hsfs")
        self._wait = pyfuse3._wait_fuse_readable  # type: ignore[attr-defined]
        self._trio = pyfuse3.trio  # type: ignore[attr-defined]
        pyfuse3._wait_fuse_readable = next_request  # type: ignore[attr-defined]
        pyfuse3.trio = SimpleNamespace(  # type: ignore[attr-defined]
            lowlevel=SimpleNamespace(current_task=lambda: task)
        )

    def __exit__(self, *_: object) -> None:
        pyfuse3._wait_fuse_readable = self._wait  # type: ignore[attr-defined]
        pyfuse3.trio = self._trio  # type: ignore[attr-defined]


def _fuse_fds() -> set[int]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}") == "/dev/fuse":
                found.add(int(entry))
        except OSError:
            continue
    return found


def _new_fd(before: set[int]) -> int:
    new = _fuse_fds() - before
    if len(new) != 1:
        raise NotSupported("pyfuse3", "its device can't be told apart")
    return new.pop()


def _device_of(path: str) -> str | None:
    """MAJOR:MINOR of the mount at `path`, without asking the mount."""
    found = None
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields = line.split(b" ")
        if fields[4].decode("unicode_escape").encode("latin-1") == os.fsencode(path):
            found = fields[2].decode()
    return found


async def _read_ahead_raised(serving: Serving, path: str, size: int) -> None:
    if os.geteuid() == 0:
        await trio.to_thread.run_sync(
            _raise_read_ahead, serving, path, size, abandon_on_cancel=True
        )


def _raise_read_ahead(serving: Serving, path: str, size: int) -> None:
    """The kernel's readahead: 128 KiB by default, too little to keep several fetches busy, and with
    it goes the size of READs (up to 1 MiB). The kernel lowers it to the default when it takes the
    answer to INIT, so this waits for that; without touching the mount, as a process that waits for
    its own answer can't be killed."""
    if not serving.begun.wait(60):
        return
    try:
        device = _device_of(os.path.realpath(os.path.dirname(path)) + "/" + os.path.basename(path))
        if device is not None:
            Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(size // 1024))
    except OSError as error:
        log.info("the kernel's readahead stays at its default: %s", error.strerror)


def _abort_connection(path: str) -> None:
    device = _device_of(path)
    if device is not None:
        connection = device.split(":")[1]
        try:
            Path(f"/sys/fs/fuse/connections/{connection}/abort").write_text("1")
        except OSError as error:
            log.info("the connection could not be aborted: %s", error.strerror)
