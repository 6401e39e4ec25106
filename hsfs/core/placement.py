"""Which replica serves which part of an extent: pure, so that every decision can be tested.

An extent is cut at chunk borders (the unit of striping); each part names its replicas in the order
in which they are to be tried. Unproven replicas never serve. Healthy devices share the chunks in
proportion to their measured throughput; a device that is full (as many reads in flight as it can
use) or ill comes after those that are not, but stays as the last resort.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hsfs.core.types import CHUNK_SIZE, DeviceId, Extent, Replica


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What is known of a device now. `bytes_per_s` 0 = not measured yet (counts as the average)."""

    healthy: bool = True
    in_flight: int = 0
    concurrency: int = 8
    read_max: int = CHUNK_SIZE
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """One read of `extent`; `replicas` in order of trial, never empty."""

    extent: Extent
    replicas: tuple[Replica, ...]


UNKNOWN_DEVICE = DeviceFacts(healthy=False)


def plan(
    extent: Extent, replicas: Sequence[Replica], facts: Mapping[DeviceId, DeviceFacts]
) -> tuple[PlannedRead, ...]:
    """Reads that cover `extent` exactly, in order and without overlap; empty when no replica is
    proven (or the extent is empty)."""
    usable = [replica for replica in replicas if replica.proven]
    if not usable or extent.length <= 0:
        return ()
    pieces = cut(extent, CHUNK_SIZE)
    if len(usable) == 1:
        only = (usable[0],)
        return tuple(PlannedRead(piece, only) for piece in pieces)
    known = [facts.get(DeviceId(replica.device), UNKNOWN_DEVICE) for replica in usable]
    weights = _weights(known)
    load = [float(fact.in_flight) for fact in known]
    reads = []
    for piece in pieces:
        order = sorted(
            range(len(usable)),
            key=lambda i: (
                not known[i].healthy,
                load[i] >= known[i].concurrency,
                (load[i] + 1.0) / weights[i],
                i,
            ),
        )
        load[order[0]] += 1.0
        reads.append(PlannedRead(piece, tuple(usable[i] for i in order)))
    return tuple(reads)


def cut(extent: Extent, unit: int) -> tuple[Extent, ...]:
    """The extent in parts that do not cross multiples of `unit` bytes."""
    parts = []
    start = extent.offset
    while start < extent.end:
        stop = min(extent.end, (start // unit + 1) * unit)
        parts.append(Extent(start, stop - start))
        start = stop
    return tuple(parts)


def _weights(facts: Sequence[DeviceFacts]) -> list[float]:
    measured = [fact.bytes_per_s for fact in facts if fact.bytes_per_s > 0]
    average = sum(measured) / len(measured) if measured else 1.0
    return [fact.bytes_per_s if fact.bytes_per_s > 0 else average for fact in facts]
