"""`hsfs status`: every mount of this user and its backends, within a second whatever hangs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import click

from hsfs.cli import exits, mountpoints, records
from hsfs.cli.output import Output, shown
from hsfs.cli.targets import find_mount, items_of, number_of, text_of
from hsfs.core.errors import HsfsError
from hsfs.core.units import format_duration, format_size
from hsfs.rpc.control import Json, call_many

_DEADLINE_S = 0.7


@dataclass(frozen=True, slots=True)
class Found:
    """Everything known, as it stands in the JSON; `degraded` when something needs a look."""

    mounts: list[Json]
    degraded: bool


def look(target: str | None) -> Found:
    """Ask all mounts (or one) at once. Raises NotFound for a target that is no mount."""
    found = records.find_all() if target is None else [find_mount(target)]
    answers = call_many([Path(r.socket) for r in found], "status", {}, deadline_s=_DEADLINE_S)
    listed = [
        _silent(record, answer) if isinstance(answer, HsfsError) else answer
        for record, answer in zip(found, answers, strict=True)
    ]
    if target is None:
        known = {record.mountpoint for record in found}
        listed += [
            _dead(mount.mountpoint)
            for mount in mountpoints.mounts()
            if mount.fs_type == mountpoints.FS_TYPE
            and mount.mountpoint not in known
            and mountpoints.answers(mount.mountpoint, 0.2) not in (0, 13)
        ]
    return Found(listed, any(mount.get("state") != "ok" for mount in listed))


def _blank(mountpoint: str, state: str, why: str) -> Json:
    return {
        "mountpoint": mountpoint,
        "pid": 0,
        "volume": "",
        "session": "",
        "session_reason": "",
        "passthrough": False,
        "staging_bytes": 0,
        "cache_bytes": 0,
        "state": state,
        "why": why,
        "backends": [],
    }


def _silent(record: records.Record, error: HsfsError) -> Json:
    return {
        **_blank(record.mountpoint, "hung", error.why),
        "pid": record.pid,
        "volume": record.volume,
        "session": record.session,
    }


def _dead(mountpoint: str) -> Json:
    return _blank(
        mountpoint, "dead", f"its process has ended: hsfs umount --force {shown(mountpoint)}"
    )


def lines(mounts: list[Json]) -> list[str]:
    """For people."""
    if not mounts:
        return ["nothing is mounted"]
    text: list[str] = []
    now = time.time()
    for mount in mounts:
        head = f"{shown(text_of(mount.get('mountpoint')))}  {text_of(mount.get('state'))}"
        if mount.get("pid"):
            head += f"  volume {shown(text_of(mount.get('volume')))}  pid {mount.get('pid')}"
        text.append(head)
        if why := text_of(mount.get("why")):
            text.append(f"    {shown(why)}")
        if mount.get("pid") and mount.get("state") != "hung":
            text.append(
                f"    cache {format_size(number_of(mount.get('cache_bytes')))} of "
                f"{format_size(number_of(mount.get('cache_size')))}   session "
                f"{text_of(mount.get('session'))} ({text_of(mount.get('session_reason'))})"
            )
        for backend in items_of(mount.get("backends")):
            as_of = backend.get("as_of")
            age = ""
            if isinstance(as_of, int | float) and as_of > 0:
                age = f"  {format_duration(now - as_of)} ago"
            scan = text_of(backend.get("scan"))
            text.append(
                f"    {shown(text_of(backend.get('at'))):<20} {text_of(backend.get('state')):<13}"
                f" {shown(text_of(backend.get('name')))}  {shown(text_of(backend.get('url')))}"
                f"{age}{f'  scan {scan}' if scan else ''}"
                f" {number_of(backend.get('scanned'))} entries"
            )
            if why := text_of(backend.get("why")):
                text.append(f"        {shown(why)}")
        text.extend(f"    note: {shown(str(note))}" for note in _notes(mount))
    return text


def _notes(mount: Json) -> list[object]:
    notes = mount.get("notes")
    return notes if isinstance(notes, list) else []


@click.command(help="Mounts and their backends; with TARGET only that mount.")
@click.argument("target", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(target: str | None, as_json: bool) -> int:
    """The verb. Exit code 3 when a mount or a backend is in trouble."""
    found = look(target)
    Output(as_json).result({"mounts": found.mounts}, lines(found.mounts))
    return exits.PARTIAL if found.degraded else exits.OK
