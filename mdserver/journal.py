"""The journal as clients see it: records become invalidations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import cast

from hsfs.core.ports import Invalidation
from hsfs.mdserver.schema import decode_change
from hsfs.mdserver.store import MetadataStore, Record


def invalidations(records: Sequence[Record]) -> tuple[Invalidation, ...]:
    """What clients have to forget, each with the sequence number of its record."""
    out: list[Invalidation] = []
    for record in records:
        items = decode_change(record.value).items
        out += [
            Invalidation(cast("int", ino), cast("bytes", name), record.seq)
            for ino, name in zip(items[::2], items[1::2], strict=True)
        ]
    return tuple(out)


async def watch(store: MetadataStore, after: int) -> AsyncIterator[Sequence[Invalidation]]:
    """Invalidations behind `after`, as they are committed. Raises Trimmed."""
    async for records in store.watch(after):
        yield invalidations(records)
