"""Rows of results: what stands in the table and in `--json`."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from bench.contest import Contest


@dataclass(frozen=True)
class Row:
    """`hsfs` and `other` in `unit`; `ratio` = hsfs / other; `bar` what the ratio has to reach.

    With `lower` the ratio has to stay below the bar (memory, requests)."""

    measure: str
    hsfs: float
    other: float
    ratio: float
    bar: float | None
    unit: str = "GB/s"
    beside: str = ""
    spread: float = 0.0
    load: float = 0.0
    lower: bool = False
    cpu: dict[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.ratio <= self.bar if self.lower else self.ratio >= self.bar


def row(
    measure: str,
    contest: Contest,
    other: str,
    bar: float | None,
    *,
    unit: str = "GB/s",
    name: str = "hsfs",
) -> Row:
    """The row of one contender beside another."""
    return Row(
        measure,
        contest.median(name),
        contest.median(other),
        contest.ratio(name, other),
        bar,
        unit,
        other,
        contest.spread(name, other),
        contest.load,
        cpu=contest.cpu(name),
    )


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps({"schema": 1, "rows": [{**asdict(r), "met": r.met} for r in rows]}, indent=1)


def as_table(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [
        f"Kernel {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}.",
        "",
        "| measure | hsfs | beside | other | ratio | bar | met | spread | load | CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        bar = "shown" if r.bar is None else f"{'<=' if r.lower else '>='} {r.bar:g}"
        met = {None: "", True: "yes", False: "**no**"}[r.met]
        cpu = " ".join(f"{kind} {seconds:.2f}" for kind, seconds in r.cpu.items())
        lines.append(
            f"| {r.measure} | {r.hsfs:.4g} {r.unit} | {r.beside} | {r.other:.4g} | {r.ratio:.2f} |"
            f" {bar} | {met} | {r.spread:.0%} | {r.load:.1f} | {cpu} |"
        )
    return "\n".join(lines)
