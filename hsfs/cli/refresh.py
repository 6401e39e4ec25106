"""`hsfs refresh`: ask the source about paths now, whatever their freshness."""

from __future__ import annotations

import click

from hsfs.cli.output import Output
from hsfs.cli.targets import ask, by_mount, number_of


@click.command(help="Ask the source about each PATH now and everything below it.")
@click.argument("paths", nargs=-1, required=True)
@click.option("--shallow", is_flag=True, help="Only the path itself, nothing below it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(paths: tuple[str, ...], shallow: bool, as_json: bool) -> None:
    """The verb."""
    entries = 0
    for record, group in by_mount(paths):
        args: dict[str, object] = {
            "paths": [inside for _, inside in group],
            "recursive": not shallow,
        }
        entries += number_of(ask(record, "refresh", args).get("entries"))
    Output(as_json).result({"entries": entries}, f"{entries} entries asked for")
