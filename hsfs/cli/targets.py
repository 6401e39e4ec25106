"""From what a user names (a mountpoint, a path inside a mount) to the mount that is meant."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hsfs.cli import records
from hsfs.cli.mountpoints import normal_path
from hsfs.core.errors import HsfsError, NotFound, UsageError
from hsfs.rpc.control import Json, call

SILENCE_S = 120.0


def find_mount(target: str | None) -> records.Record:
    """The mount at or around TARGET; without one, the only mount there is. Raises NotFound,
    UsageError (several)."""
    if target is not None:
        found = records.find_around(normal_path(target))
        if found is None:
            raise NotFound(target, "is in no hsfs mount of yours", "hsfs status lists them")
        return found[0]
    mounts = records.find_all()
    if not mounts:
        raise NotFound("mount", "nothing is mounted", "hsfs mount SOURCE MOUNTPOINT")
    if len(mounts) > 1:
        names = ", ".join(record.mountpoint for record in mounts)
        raise UsageError("mount", f"several mounts: {names}", "name one of them")
    return mounts[0]


def by_mount(paths: Sequence[str]) -> list[tuple[records.Record, list[tuple[str, str]]]]:
    """The paths grouped by mount, each as (as the user wrote it, path below the mountpoint).
    Raises NotFound for a path in no mount."""
    groups: dict[str, tuple[records.Record, list[tuple[str, str]]]] = {}
    for path in paths:
        found = records.find_around(_parent_normal(path))
        if found is None:
            raise NotFound(path, "is in no hsfs mount of yours", "hsfs status lists them")
        record, inside = found
        groups.setdefault(record.mountpoint, (record, []))[1].append((path, inside))
    return list(groups.values())


def _parent_normal(path: str) -> str:
    """As normal_path. A link into a mount is followed, since it lies outside of it; a link inside a
    mount is the mount's own business."""
    return normal_path(path)


def ask(
    record: records.Record,
    op: str,
    args: Json,
    *,
    silence_s: float = SILENCE_S,
    progress: Callable[[Json], None] | None = None,
) -> Json:
    """One control call to a mount. Raises what the mount answers, Unavailable, TimedOut."""
    try:
        return call(Path(record.socket), op, args, silence_s=silence_s, progress=progress)
    except HsfsError as e:
        if e.what.startswith("mount's control socket"):
            raise type(e)(record.mountpoint, e.why, f"see {record.log or 'its terminal'}") from None
        raise


def text_of(value: object) -> str:
    """A JSON string field, "" for anything else."""
    return value if isinstance(value, str) else ""


def number_of(value: object) -> int:
    """A JSON whole-number field, 0 for anything else."""
    return int(value) if isinstance(value, int | float) else 0


def items_of(value: object) -> list[Json]:
    """A JSON list of objects, without whatever else stands in it."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def absolute(path: str) -> str:
    """For display and JSON: the path without touching it."""
    return os.path.abspath(path)
