"""`hsfs evict`: drop the cached bytes of files, or of everything below directories."""

from __future__ import annotations

import click

from hsfs.cli.output import Output
from hsfs.cli.targets import ask, by_mount, number_of
from hsfs.core.units import format_size


@click.command(help="Drop the cached bytes of each PATH (directories: of all files below).")
@click.argument("paths", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(paths: tuple[str, ...], as_json: bool) -> None:
    """The verb. Files that are open keep their bytes."""
    freed = 0
    for record, group in by_mount(paths):
        answer = ask(record, "evict", {"paths": [inside for _, inside in group]})
        freed += number_of(answer.get("bytes"))
    Output(as_json).result({"bytes": freed}, f"{format_size(freed)} freed")
