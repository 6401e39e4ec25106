"""`hsfs info`: where the bytes of a path are, which version, how fresh, and what is cached."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from hsfs.cli import exits
from hsfs.cli.output import Output, shown
from hsfs.cli.targets import ask, by_mount, items_of, number_of, text_of
from hsfs.core.units import format_duration, format_size
from hsfs.rpc.control import Json


def collect(paths: Sequence[str]) -> list[Json]:
    """One object per path, in the order of the command line; a path that can't be shown has an
    `error`. Raises NotFound for a path in no mount."""
    found: dict[str, Json] = {}
    for record, group in by_mount(paths):
        result = ask(record, "info", {"paths": [inside for _, inside in group]})
        for (written, _), item in zip(group, items_of(result.get("paths")), strict=True):
            found[written] = {**item, "path": written, "mountpoint": record.mountpoint}
    return [found[path] for path in dict.fromkeys(paths)]


def lines(items: Sequence[Json]) -> list[str]:
    """For people."""
    text: list[str] = []
    for item in items:
        path = shown(text_of(item.get("path")))
        error = item.get("error")
        if isinstance(error, dict):
            text.append(f"{path}: {shown(text_of(error.get('why')) or text_of(error.get('code')))}")
            continue
        text.append(path)
        as_of = item.get("as_of")
        fresh = "never confirmed"
        if isinstance(as_of, int | float) and as_of > 0:
            fresh = f"confirmed {format_duration(time.time() - as_of)} ago"
        if item.get("stale"):
            fresh += ", stale: its source can't be reached"
        size = number_of(item.get("size"))
        text.append(
            f"    {text_of(item.get('type'))}  ino {item.get('ino')}  {size} bytes  {fresh}"
        )
        if item.get("type") == "file":
            cached = number_of(item.get("cached_bytes"))
            share = f" ({100 * cached // size}%)" if size else ""
            text.append(
                f"    version {shown(text_of(item.get('version')))}  "
                f"cached {format_size(cached)}{share}"
            )
        text.extend(
            f"    {text_of(replica.get('state')):<12} {shown(text_of(replica.get('backend')))}"
            f"  {shown(text_of(replica.get('key')))}"
            for replica in items_of(item.get("replicas"))
        )
    return text


@click.command(help="Where the bytes of each PATH are, which version, and how fresh that is.")
@click.argument("paths", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(paths: tuple[str, ...], as_json: bool) -> int:
    """The verb. Exit code 3 when some paths can't be shown, 4 when none can."""
    items = collect(paths)
    Output(as_json).result({"paths": items}, lines(items))
    bad = sum("error" in item for item in items)
    if bad == len(items):
        return exits.NOT_FOUND
    return exits.PARTIAL if bad else exits.OK
