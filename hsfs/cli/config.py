"""`hsfs config show`: the settings of a volume as hsfs understands them."""

from __future__ import annotations

from collections.abc import Iterator

import click

from hsfs.cli.output import Output, shown
from hsfs.cli.sources import find_volume
from hsfs.core import settings
from hsfs.core.config import BackendConfig, Volume
from hsfs.core.settings import Setting

_DURATIONS = frozenset(("freshness", "timeout", "reconcile"))


def show(volume: Volume) -> Iterator[tuple[str, Setting | None, str]]:
    """(key, value, where it was set) of everything in force."""

    def item(key: str, value: Setting | None) -> tuple[str, Setting | None, str]:
        return key, value, volume.origins.get(key, "default")

    yield item("volume.name", volume.name)
    yield item("volume.state", str(volume.state))
    yield item("volume.store", volume.store)
    for backend in volume.backends:
        yield from (item(f"backend.{backend.name}.{k}", v) for k, v in _backend(backend))
    yield item("cache.dir", str(volume.cache.dir))
    yield item("cache.size", volume.cache.size)
    yield item("mount.memory_limit", volume.mount.memory_limit)
    yield item("mount.fd_limit", volume.mount.fd_limit)
    yield item("mount.readahead", volume.mount.readahead)
    yield item("mds.listen", volume.mds.listen)
    yield item("mds.http", volume.mds.http)


def _backend(backend: BackendConfig) -> Iterator[tuple[str, Setting]]:
    yield "url", backend.url
    yield "at", backend.at
    for key in settings.BACKEND:
        if key in backend.options:
            yield key, backend.options[key]


def _shown(key: str, value: Setting | None) -> str:
    if value is None:
        return "automatic"
    name = key.rpartition(".")[2]
    if name.endswith("_mode") and isinstance(value, int):
        return f"0{value:03o}"
    if name in _DURATIONS and isinstance(value, float):
        return f"{value:g}s"
    if isinstance(value, bool):
        return str(value).lower()
    return shown(str(value))


def _remark(key: str, origin: str) -> str:
    table, _, name = key.partition(".")
    known = settings.TABLES[table].get(name.rpartition(".")[2])
    remarks = [remark for remark in (shown(origin), known.note if known else "") if remark]
    return f"    # {', '.join(remarks)}" if remarks else ""


@click.group(name="config", help="Settings of a volume.")
def command() -> None:
    """The verb."""


@command.command(name="show", help="Every setting in force; --origin says where it was set.")
@click.argument("source", required=False)
@click.option("--backend", "backends", multiple=True, metavar="AT=URL", help="As for hsfs mount.")
@click.option("--origin", is_flag=True, help="Where each value comes from.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def show_command(
    source: str | None, backends: tuple[str, ...], origin: bool, as_json: bool
) -> None:
    """`config show`."""
    volume, _ = find_volume(source, "/", backends)
    items = list(show(volume))
    if origin:
        values: dict[str, object] = {
            key: {"value": value, "origin": where} for key, value, where in items
        }
    else:
        values = {key: value for key, value, _ in items}
    width = max(len(key) for key, _, _ in items)
    Output(as_json).result(
        {"config": values},
        [
            f"{key:<{width}} = {_shown(key, value)}{_remark(key, where if origin else '')}"
            for key, value, where in items
        ],
    )
