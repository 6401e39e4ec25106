"""The exception tree: a leaf says what the caller may do next.

Every layer raises leaves of `HsfsError`; foreign exceptions are converted at the border that met
them (`map_errors`). `errno` is what a file-system caller is answered; `what`, `why` and `next_step`
make the one line that a person reads. Errors travel over the wire as (errno, code, text, detail)
and come back as the same leaf (`from_code`).
"""

from __future__ import annotations

import errno as _errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar


class HsfsError(Exception):
    """Root of all errors that hsfs raises on purpose.

    `what` names the thing (a path, a backend, a setting), `why` the cause, `next_step` what the
    person at the keyboard can do about it; the last two may be empty.
    """

    errno: ClassVar[int] = _errno.EIO

    def __init__(self, what: str = "", why: str = "", next_step: str = "") -> None:
        super().__init__(what, why, next_step)
        self.what = what
        self.why = why
        self.next_step = next_step

    @property
    def code(self) -> str:
        """The leaf's name, stable on the wire and in `--json`: the other end knows the classes of
        this module only, so that a private subclass goes by its nearest one here."""
        kinds = (kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        return next(kinds).__name__

    def __str__(self) -> str:
        text = self.what or self.code
        if self.why:
            text += f": {self.why}"
        if self.next_step:
            text += f"; {self.next_step}"
        return text


class NotFound(HsfsError):
    """The name, key or inode does not exist."""

    errno = _errno.ENOENT


class NotADirectory(HsfsError):
    """A directory was needed and something else is there."""

    errno = _errno.ENOTDIR


class IsADirectory(HsfsError):
    """A file was needed and a directory is there."""

    errno = _errno.EISDIR


class AlreadyExists(HsfsError):
    """The name is taken."""

    errno = _errno.EEXIST


class PermissionDenied(HsfsError):
    """The caller may not do this (local permission)."""

    errno = _errno.EACCES


class Unauthorised(HsfsError):
    """The backend or server refuses our credentials or our address: fix the configuration."""

    errno = _errno.EACCES


class ReadOnly(HsfsError):
    """Nothing can be written here; the message names the setting."""

    errno = _errno.EROFS


class InvalidName(HsfsError):
    """A name that no key has, or that cannot be one."""

    errno = _errno.EINVAL


class NameTooLong(HsfsError):
    """A name over 255 bytes."""

    errno = _errno.ENAMETOOLONG


class NotSupported(HsfsError):
    """This server, kernel or backend cannot do it."""

    errno = _errno.EOPNOTSUPP


class NoAttribute(HsfsError):
    """The extended attribute does not exist."""

    errno = _errno.ENODATA


class StaleVersion(HsfsError):
    """The source no longer holds the version that was asked for: refresh and open again."""

    errno = _errno.ESTALE


class StaleHandle(HsfsError):
    """The native handle is no longer known to its server: look the name up again."""

    errno = _errno.ESTALE


class Unavailable(HsfsError):
    """The backend or server can't be reached or answers 5xx: another replica, or later."""


class Throttled(Unavailable):
    """The server asks for patience; `retry_after_s` is its wish (seconds, 0 = none given)."""

    def __init__(
        self, what: str = "", why: str = "", next_step: str = "", retry_after_s: float = 0.0
    ) -> None:
        super().__init__(what, why, next_step)
        self.retry_after_s = retry_after_s


class TimedOut(Unavailable):
    """No progress within the backend's `timeout`."""

    errno = _errno.ETIMEDOUT


class Corrupt(HsfsError):
    """Bytes that arrived, or that lie in the cache, are provably wrong: never passed on."""


class NoSpace(HsfsError):
    """Tier 0 has no room left within its size, or its disk is full."""

    errno = _errno.ENOSPC


class CacheUnavailable(HsfsError):
    """The cache directory is lost, read-only or failing: read through instead."""


class Busy(HsfsError):
    """Somebody else holds it (another process, an open file)."""

    errno = _errno.EBUSY


class Interrupted(HsfsError):
    """The caller went away; nothing was decided."""

    errno = _errno.EINTR


class ProtocolError(HsfsError):
    """The peer sent what its protocol does not allow."""


class UsageError(HsfsError):
    """The command line is wrong."""

    errno = _errno.EINVAL


class ConfigError(HsfsError):
    """A volume file or setting is wrong; `what` names file and line."""

    errno = _errno.EINVAL


class Conflict(HsfsError):
    """A conditional commit found another version: read again and retry."""

    errno = _errno.EAGAIN


class UnknownResult(HsfsError):
    """A commit may or may not have happened: ask by request id."""


class Trimmed(HsfsError):
    """The journal no longer holds the asked sequence: drop what was cached."""


class LeaseLost(HsfsError):
    """The session's lease ended without a renewal."""


class Unsupported(HsfsError):
    """Stored state or a peer of a newer format than this version reads."""


def _leaves(root: type[HsfsError]) -> Iterator[type[HsfsError]]:
    for leaf in root.__subclasses__():
        yield leaf
        yield from _leaves(leaf)


_BY_CODE: Mapping[str, type[HsfsError]] = {leaf.__name__: leaf for leaf in _leaves(HsfsError)}


def from_code(code: str, what: str, why: str = "", next_step: str = "") -> HsfsError:
    """The leaf named `code` (unknown codes of a newer peer become HsfsError itself)."""
    return _BY_CODE.get(code, HsfsError)(what, why, next_step)


@contextmanager
def map_errors(mapping: Mapping[type[BaseException], type[HsfsError]], what: str) -> Iterator[None]:
    """Convert foreign exceptions at a border; the first matching class of `mapping` decides."""
    try:
        yield
    except HsfsError:
        raise
    except tuple(mapping) as error:
        for foreign, leaf in mapping.items():
            if isinstance(error, foreign):
                raise leaf(what, str(error) or type(error).__name__) from error
        raise


_BY_ERRNO: Mapping[int, type[HsfsError]] = {
    _errno.ENOENT: NotFound,
    _errno.ENOTDIR: NotADirectory,
    _errno.EISDIR: IsADirectory,
    _errno.EEXIST: AlreadyExists,
    _errno.EACCES: PermissionDenied,
    _errno.EPERM: PermissionDenied,
    _errno.EROFS: ReadOnly,
    _errno.ENAMETOOLONG: NameTooLong,
    _errno.ESTALE: StaleHandle,
    _errno.ENOSPC: NoSpace,
    _errno.EDQUOT: NoSpace,
    _errno.ETIMEDOUT: TimedOut,
    _errno.ENODATA: NoAttribute,
    _errno.EOPNOTSUPP: NotSupported,
}


def from_os_error(error: OSError, what: str) -> HsfsError:
    """The leaf for an OSError of the local file system (unknown errnos: Unavailable)."""
    leaf = _BY_ERRNO.get(error.errno or 0, Unavailable)
    return leaf(what, error.strerror or str(error))
