"""`hsfs stats`: counters of a mount, once or every second."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click

from hsfs.cli.output import Output, shown
from hsfs.cli.targets import ask, find_mount
from hsfs.core.errors import UsageError
from hsfs.core.units import format_size
from hsfs.rpc.control import Json


def _flat(value: Json, prefix: str = "") -> Iterator[tuple[str, int | float | str]]:
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict):
            yield from _flat(item, f"{name}.")
        elif isinstance(item, bool | str):
            yield name, str(item)
        elif isinstance(item, int | float):
            yield name, item


def lines(stats: Json, before: Json | None = None, seconds: float = 1.0) -> list[str]:
    """For people: a line per counter, with its rate when there is an earlier reading."""
    earlier = dict(_flat(before)) if before is not None else {}
    text = []
    for name, value in _flat(stats):
        line = f"{shown(name):<44} {value if isinstance(value, str) else f'{value:.15g}'}"
        old = earlier.get(name)
        if isinstance(value, int | float) and isinstance(old, int | float) and value != old:
            rate = (value - old) / seconds
            shown_rate = format_size(round(abs(rate))) if "bytes" in name else f"{rate:.1f}"
            line += f"   {'-' if rate < 0 and 'bytes' in name else ''}{shown_rate}/s"
        text.append(line)
    return text


@click.command(help="Counters of a mount (the only one, if MOUNT is left out).")
@click.argument("mount", required=False)
@click.option("-l", "--live", is_flag=True, help="Again every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(mount: str | None, live: bool, as_json: bool) -> None:
    """The verb."""
    if live and as_json:
        raise UsageError("stats", "--live and --json exclude each other", "leave out one")
    record = find_mount(mount)
    output = Output(as_json)
    stats = ask(record, "stats", {})
    output.result(stats, lines(stats))
    while live:
        began = time.monotonic()
        time.sleep(1)
        before, stats = stats, ask(record, "stats", {})
        output.result(stats, ["", *lines(stats, before, time.monotonic() - began)])
