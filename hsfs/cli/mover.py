"""`hsfs mover`: run jobs against the backends for a metadata server, in the foreground."""

from __future__ import annotations

import click

from hsfs.cli.mount_checks import explain
from hsfs.cli.sources import find_volume
from hsfs.core.errors import HsfsError


@click.command(help="Run jobs for the metadata server of SOURCE until SIGTERM or Ctrl-C.")
@click.argument("source")
@click.option("--json", "as_json", is_flag=True, help="Errors as JSON.")
def command(source: str, as_json: bool) -> None:
    """The verb."""
    import trio

    from hsfs.cli.mover_process import run
    from hsfs.rpc.address import parse_address, state_address
    from hsfs.telemetry.logs import set_up_logging

    volume, address = find_volume(source, "/")
    set_up_logging("mover")
    where = parse_address(address) if address else state_address(volume.state)
    try:
        trio.run(run, where)
    except BaseExceptionGroup as group:
        error = explain(group)
        if isinstance(error, HsfsError):
            raise error from group
        raise
