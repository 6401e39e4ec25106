"""Exit codes, stable: scripts depend on them.

All verbs: 0 ok, 1 failed, 2 usage, 3 degraded or partial, 4 not found, 5 permission, 6 unavailable
or timed out. `mount` and `mount.hsfs` speak mount(8) instead: 1 usage or permission, 32 failed.
"""

from __future__ import annotations

from hsfs.core import errors
from hsfs.core.errors import HsfsError

OK = 0
FAILED = 1
USAGE = 2
PARTIAL = 3
NOT_FOUND = 4
PERMISSION = 5
UNAVAILABLE = 6
INTERRUPTED = 130

MOUNT_USAGE = 1
MOUNT_FAILED = 32

_USAGE = (errors.UsageError, errors.ConfigError)
_PERMISSION = (errors.PermissionDenied, errors.Unauthorised, errors.ReadOnly)
_UNAVAILABLE = (errors.Unavailable, errors.LeaseLost)


def exit_code(error: HsfsError) -> int:
    """What a verb that failed so exits with."""
    if isinstance(error, _USAGE):
        return USAGE
    if isinstance(error, errors.NotFound):
        return NOT_FOUND
    if isinstance(error, _PERMISSION):
        return PERMISSION
    if isinstance(error, _UNAVAILABLE):
        return UNAVAILABLE
    return FAILED


def mount_exit_code(error: HsfsError) -> int:
    """What `mount` and `mount.hsfs` exit with."""
    return MOUNT_USAGE if isinstance(error, (*_USAGE, errors.PermissionDenied)) else MOUNT_FAILED
