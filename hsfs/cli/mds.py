"""`hsfs mds`: serve a volume's metadata in the foreground."""

from __future__ import annotations

import os

import click

from hsfs.cli.output import Output
from hsfs.core.config import load_volume
from hsfs.core.errors import UsageError


@click.command(help="Serve the metadata of VOLUME, a volume file, until SIGTERM or Ctrl-C.")
@click.argument("volume")
@click.option("--listen", metavar="HOST:PORT", help="TCP as well (127.0.0.1:7420).")
@click.option("--http", metavar="HOST:PORT", help="/metrics and /healthz (127.0.0.1:7421).")
@click.option("--no-mover", is_flag=True, help="Start no mover; some other node runs one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout once it serves.")
def command(
    volume: str, listen: str | None, http: str | None, no_mover: bool, as_json: bool
) -> None:
    """The verb."""
    if volume.startswith(("hsfs://", "unix:")):
        raise UsageError("mds", "needs a volume file", "hsfs mds VOLUME.toml")
    from hsfs.cli.mds_process import Options, Serving, run
    from hsfs.telemetry.logs import set_up_logging

    loaded = load_volume(volume)
    output = Output(as_json)
    set_up_logging("mds")

    def ready(serving: Serving) -> None:
        where = [str(serving.address)]
        if serving.tcp is not None:
            where.append(f"hsfs://{_pair(serving.tcp)}/{loaded.name}")
        if serving.http is not None:
            where.append(f"http://{_pair(serving.http)}")
        output.result(
            {
                "volume": loaded.name,
                "pid": os.getpid(),
                "socket": str(serving.address.path),
                "listen": _pair(serving.tcp) if serving.tcp is not None else None,
                "http": _pair(serving.http) if serving.http is not None else None,
            },
            f"serving {loaded.name} at {', '.join(where)}",
        )

    run(
        loaded,
        Options(
            listen=listen or loaded.mds.listen,
            http=http or loaded.mds.http,
            mover=not no_mover,
        ),
        ready,
    )


def _pair(address: tuple[str, int]) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"
