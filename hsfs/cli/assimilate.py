"""`hsfs assimilate`: scan backends into the metadata server and wait for the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from hsfs.cli import exits
from hsfs.cli.output import Output, shown
from hsfs.cli.sources import find_volume
from hsfs.core.units import format_duration
from hsfs.proto.messages import ScanStatus
from hsfs.rpc.address import Address, find_token, parse_address
from hsfs.rpc.blocking import BlockingClient
from hsfs.rpc.control import Json

_POLL_S = 0.25
_OVER = ("done", "failed", "lazy", "")


def scan_json(scan: ScanStatus) -> Json:
    """One backend's scan."""
    return {
        "backend": scan.backend,
        "state": scan.state,
        "entries": scan.entries,
        "directories": scan.directories,
        "entries_per_s": round(scan.entries_per_s, 1),
        "elapsed_s": round(scan.elapsed_s, 3),
        "eta_s": round(scan.eta_s, 1) if scan.eta_s >= 0 else None,
        "why": scan.why,
    }


def _line(scan: ScanStatus) -> str:
    text = f"{shown(scan.backend):<16} {scan.state:<8} {scan.entries} entries"
    if scan.elapsed_s > 0:
        text += f" in {format_duration(scan.elapsed_s)}"
    if scan.entries_per_s > 0:
        text += f" ({scan.entries_per_s:.0f}/s)"
    return f"{text}: {shown(scan.why)}" if scan.why else text


def find_server(source: str) -> Address:
    """The server of a volume; a volume file's own is started when none runs."""
    volume, address = find_volume(source, "/")
    if address:
        return parse_address(address)
    from hsfs.cli.embedded import ensure_embedded

    return ensure_embedded(volume)


def _chosen(scans: Sequence[ScanStatus], backends: Sequence[str]) -> list[ScanStatus]:
    return [scan for scan in scans if not backends or scan.backend in backends]


@click.command(help="Scan the backends of SOURCE (or one BACKEND of it) and wait for the end.")
@click.argument("source")
@click.argument("backend", required=False)
@click.option("--watch", is_flag=True, help="Only watch scans that run; start none.")
@click.option("--restart", is_flag=True, help="From the start, even if a scan is under way.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(source: str, backend: str | None, watch: bool, restart: bool, as_json: bool) -> int:
    """The verb. Exit code 3 when some scans failed, 6 when all did."""
    output = Output(as_json)
    backends = (backend,) if backend is not None else ()
    address = find_server(source)
    with BlockingClient(address, token=find_token(address), timeout_s=60) as client:
        if not watch:
            client.assimilate(backends, restart=restart)
        with output.progress("assimilate") as steps:
            while True:
                scans = _chosen(client.scans(), backends)
                if all(scan.state in _OVER for scan in scans):
                    break
                entries = sum(scan.entries for scan in scans)
                pace = sum(scan.entries_per_s for scan in scans if scan.state == "running")
                left = max((scan.eta_s for scan in scans), default=-1.0)
                total = entries + pace * left if left > 0 and pace > 0 else None
                text = f"{entries} entries, {pace:.0f}/s"
                if left > 0:
                    text += f", {format_duration(left)} left"
                detail: Json = {
                    "entries": entries,
                    "entries_per_s": round(pace, 1),
                    "eta_s": round(left, 1) if left >= 0 else None,
                    "backends": [scan_json(scan) for scan in scans],
                }
                steps.update(entries, total, text, detail)
                time.sleep(_POLL_S)
    failed = sum(scan.state == "failed" for scan in scans)
    output.result(
        {
            "entries": sum(scan.entries for scan in scans),
            "failed": failed,
            "backends": [scan_json(scan) for scan in scans],
        },
        [_line(scan) for scan in scans],
    )
    if not failed:
        return exits.OK
    return exits.PARTIAL if failed < len(scans) else exits.UNAVAILABLE
