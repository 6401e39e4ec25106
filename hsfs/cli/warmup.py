"""`hsfs warmup`: bring files into the cache, directories with everything below them."""

from __future__ import annotations

import click

from hsfs.cli import exits
from hsfs.cli.output import Output, shown
from hsfs.cli.targets import ask, by_mount, items_of, number_of, text_of
from hsfs.core.units import format_size
from hsfs.rpc.control import Json


@click.command(help="Bring the files at and below each PATH into the cache.")
@click.argument("paths", nargs=-1, required=True)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout, progress on stderr."
)
def command(paths: tuple[str, ...], as_json: bool) -> int:
    """The verb. Exit code 3 when some files failed, 1 when all did."""
    output = Output(as_json)
    files = size = failed = 0
    errors: list[Json] = []
    with output.progress("warmup") as steps:
        for record, group in by_mount(paths):

            def step(at: Json, files: int = files, size: int = size, failed: int = failed) -> None:
                done = files + number_of(at.get("files"))
                moved = size + number_of(at.get("bytes"))
                known = size + number_of(at.get("total_bytes"))
                bad = failed + number_of(at.get("failed"))
                text = f"{done} files, {format_size(moved)} of {format_size(known)}"
                detail: Json = {"files": done, "bytes": moved, "total_bytes": known, "failed": bad}
                steps.update(moved, known or None, text, detail)

            answer = ask(
                record, "warmup", {"paths": [inside for _, inside in group]}, progress=step
            )
            files += number_of(answer.get("files"))
            size += number_of(answer.get("bytes"))
            failed += number_of(answer.get("failed"))
            errors += items_of(answer.get("errors"))
    text = [f"{files} files, {format_size(size)} in the cache"]
    if failed:
        text[0] += f", {failed} failed"
    text += [f"    {shown(text_of(e.get('path')))}: {shown(text_of(e.get('why')))}" for e in errors]
    output.result({"files": files, "bytes": size, "failed": failed, "errors": errors}, text)
    if not failed:
        return exits.OK
    return exits.PARTIAL if files else exits.FAILED
