"""`hsfs backend list|test`: the backends of a volume, and whether this machine can use them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import click

from hsfs.cli import exits
from hsfs.cli.output import Output, shown
from hsfs.cli.sources import find_volume, is_address
from hsfs.cli.targets import text_of
from hsfs.core.config import BackendConfig, Volume
from hsfs.core.errors import HsfsError, NotFound, TimedOut, Unauthorised
from hsfs.core.types import DeviceId, Place
from hsfs.rpc.control import Json

_MDS_S = 2.0


@click.group(name="backend", help="List or test the backends of a volume.")
def command() -> None:
    """The verb."""


def known_devices(source: str | None, volume: Volume) -> Mapping[str, Json]:
    """What a running metadata server says of the backends, by name; nothing when none runs."""
    from hsfs.rpc.address import find_token, parse_address, state_address
    from hsfs.rpc.blocking import BlockingClient

    named = source is not None and is_address(source)
    address = parse_address(source) if named and source else state_address(volume.state)
    try:
        with BlockingClient(address, token=find_token(address), timeout_s=_MDS_S) as client:
            return {
                device.name: {
                    "name": device.name,
                    "url": device.url,
                    "at": device.at,
                    "access": device.options.get("access", "ro"),
                    "state": device.state,
                    "why": device.why,
                    "as_of": round(device.as_of_ns / 1e9, 6) if device.as_of_ns > 0 else None,
                    "scanned": device.scanned,
                    "scan": device.scan_state,
                }
                for device in client.devices()
            }
    except HsfsError:
        if named:
            raise
        return {}


@command.command(name="list", help="The backends of SOURCE and what is known of their state.")
@click.argument("source", required=False)
@click.option("--backend", "specs", multiple=True, metavar="AT=URL", help="As for hsfs mount.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def list_command(source: str | None, specs: tuple[str, ...], as_json: bool) -> None:
    """`backend list`."""
    volume, _ = find_volume(source, "/", specs)
    known = known_devices(source, volume)
    items: list[Json] = [
        {
            "name": b.name,
            "url": b.url,
            "at": b.at,
            "access": b.options.get("access", "ro"),
            "state": "unknown",
            "why": "",
            "as_of": None,
            **known.get(b.name, {}),
        }
        for b in volume.backends
    ] or list(known.values())
    Output(as_json).result(
        {"volume": volume.name, "backends": items},
        [
            f"{shown(text_of(i['name'])):<16} {text_of(i['state']):<13} "
            f"{shown(text_of(i['at'])):<20} {shown(text_of(i['url']))}"
            for i in items
        ],
    )


async def _try(index: int, config: BackendConfig, results: dict[int, Json]) -> None:
    import trio

    from hsfs.backends.registry import open_backend
    from hsfs.cli.mount_backends import state_of

    began = time.monotonic()
    timeout = config.options.get("timeout", 30.0)
    timeout_s = float(timeout) if isinstance(timeout, int | float) else 30.0
    result: Json = {"name": config.name, "url": config.url, "at": config.at}
    error: HsfsError | None = None
    entries: int | None = None
    try:
        with trio.fail_after(timeout_s + 5):
            backend = await open_backend(DeviceId(index + 1), config.url, config.options)
            try:
                await backend.probe()
                result["latency_s"] = round(time.monotonic() - began, 4)
                entries = 0
                async for page in backend.scan(Place(b"")):
                    entries += len(page.entries)
                    result["more"] = bool(page.cursor)
                    break
            finally:
                with trio.move_on_after(2, shield=True):
                    await backend.aclose()
    except trio.TooSlowError:
        error = TimedOut("", f"no answer within {timeout_s:g} s")
    except HsfsError as e:
        error = e
    if error is None:
        result |= {"state": "ok", "why": "", "next": "", "entries": entries}
    else:
        result |= {
            "state": state_of(error),
            "why": error.why or error.what,
            "next": error.next_step,
            "code": error.code,
        }
    results[index] = result


def probe(volume: Volume) -> list[Json]:
    """Open, probe and list the root of every backend, all at once, from this process."""
    import trio

    results: dict[int, Json] = {}

    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for index, config in enumerate(volume.backends):
                nursery.start_soon(_try, index, config, results)

    trio.run(all_of_them)
    return [results[index] for index in sorted(results)]


def result_code(results: Sequence[Json]) -> int:
    """0 all work, 3 some do, else by the first: 4 missing, 5 refused, 6 no answer."""
    bad = [r for r in results if r["state"] != "ok"]
    if not bad:
        return exits.OK
    if len(bad) < len(results):
        return exits.PARTIAL
    codes: dict[str, HsfsError] = {"missing": NotFound(), "unauthorised": Unauthorised()}
    return exits.exit_code(codes.get(text_of(bad[0]["state"]), TimedOut()))


def lines(results: Sequence[Json]) -> list[str]:
    """For people."""
    text = []
    for item in results:
        line = (
            f"{shown(text_of(item['name'])):<16} {item['state']:<13} {shown(text_of(item['url']))}"
        )
        if item["state"] == "ok":
            more = "+" if item.get("more") else ""
            line += f"  {item['latency_s']} s, {item['entries']}{more} entries at the top"
        text.append(line)
        if why := text_of(item.get("why")):
            step = text_of(item.get("next"))
            text.append(f"    {shown(why)}" + (f"; {shown(step)}" if step else ""))
    return text


@command.command(name="test", help="Open, probe and list the backends of SOURCE from here.")
@click.argument("source", required=False)
@click.argument("name", required=False)
@click.option("--backend", "specs", multiple=True, metavar="AT=URL", help="As for hsfs mount.")
@click.option("--anonymous", is_flag=True, help="Buckets are public: send no credentials.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def test_command(
    source: str | None, name: str | None, specs: tuple[str, ...], anonymous: bool, as_json: bool
) -> int:
    """`backend test`."""
    volume, _ = find_volume(source, "/", specs, anonymous=anonymous)
    if source is not None and is_address(source):
        devices = known_devices(source, volume)
        raise NotFound(
            source,
            f"is a server with {len(devices)} backends, which are tested from a volume file",
            "hsfs backend test VOLUME.toml",
        )
    chosen = [b for b in volume.backends if name is None or b.name == name]
    if not chosen:
        known = ", ".join(b.name for b in volume.backends)
        raise NotFound(f"backend {name}", "is not in this volume", f"known are: {known}")
    results = probe(replace(volume, backends=tuple(chosen)))
    Output(as_json).result({"volume": volume.name, "backends": results}, lines(results))
    return result_code(results)
