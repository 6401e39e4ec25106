"""`mount.hsfs`: what mount(8), and so fstab and systemd, run for `mount -t hsfs`.

    mount.hsfs SOURCE MOUNTPOINT [-sfnv] [-N NAMESPACE] [-t TYPE] [-o OPTIONS]

-s ignores unknown options, -f checks without mounting, -n is meaningless since /etc/mtab is a link,
-v says what happens, -N enters another mount namespace first (a path, or a pid).
"""

from __future__ import annotations

import ctypes
import getopt
import os
import sys
from collections.abc import Sequence

from hsfs.cli import exits
from hsfs.cli.main import run
from hsfs.cli.output import Output
from hsfs.core.errors import HsfsError, NotFound, UsageError, from_os_error

_USAGE = "mount.hsfs SOURCE MOUNTPOINT [-sfnv] [-N NAMESPACE] [-t TYPE] [-o OPTIONS]"
_TYPES = ("hsfs", "fuse.hsfs", "fuse", "fuse3")
_CLONE_NEWNS = 0x00020000


def _enter(namespace: str) -> None:
    path = f"/proc/{namespace}/ns/mnt" if namespace.isdigit() else namespace
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(f"-N {namespace}", "there is no such namespace") from None
    except OSError as e:
        raise from_os_error(e, f"-N {namespace}") from e
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _CLONE_NEWNS) != 0:
            code = ctypes.get_errno()
            raise from_os_error(OSError(code, os.strerror(code)), f"-N {namespace}")
    finally:
        os.close(fd)


def _parse(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    try:
        return getopt.gnu_getopt(list(arguments), "sfnvhN:t:o:", ["help", "version"])
    except getopt.GetoptError as e:
        raise UsageError("mount.hsfs", e.msg, _USAGE) from None


def _mount(arguments: Sequence[str]) -> int:
    from hsfs.cli.mount import MountRequest, mount

    switches, words = _parse(arguments)
    flags = {name for name, _ in switches}
    if flags & {"-h", "--help"}:
        print(_USAGE)
        return exits.OK
    if "--version" in flags:
        from hsfs import __version__

        print(f"mount.hsfs {__version__}")
        return exits.OK
    if len(words) != 2:
        raise UsageError("mount.hsfs", "needs SOURCE and MOUNTPOINT", _USAGE)
    options: list[str] = []
    for name, value in switches:
        if name == "-o":
            options.append(value)
        elif name == "-t" and value not in _TYPES:
            raise UsageError(f"-t {value}", "is not hsfs", "use -t hsfs")
        elif name == "-N":
            _enter(value)
    output = Output()
    if "-v" in flags:
        output.note(f"mounting {words[0]} on {words[1]}")
    mount(
        MountRequest(
            source=words[0],
            mountpoint=words[1],
            options=options,
            sloppy="-s" in flags,
            fake="-f" in flags,
        ),
        output,
    )
    return exits.OK


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `mount.hsfs`."""
    own_process = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)

    def code_of(error: HsfsError) -> int:
        return exits.mount_exit_code(error)

    run("mount.hsfs", lambda: _mount(arguments), arguments, code_of, own_process)
