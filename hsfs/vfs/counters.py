"""Counters of one front. Plain integers: a lost increment under contention costs a digit in a
report and a lock would cost every read."""

from __future__ import annotations

from collections import Counter


class Counters:
    """What `stats`, `status` and the bench read. Bytes unless the name says otherwise."""

    __slots__ = (
        "bytes_from_backends",
        "bytes_from_memory",
        "bytes_from_tier0",
        "cache_hits",
        "cache_misses",
        "errors",
        "fetched",
        "node_hits",
        "node_misses",
        "ops",
        "read_around",
        "reads",
        "siblings_bytes",
        "siblings_fetched",
        "siblings_unused",
        "siblings_used",
        "stale",
    )

    def __init__(self) -> None:
        self.ops: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.fetched: Counter[int] = Counter()  # bytes by device
        self.reads = 0
        self.bytes_from_memory = 0  # small files held for their reader
        self.bytes_from_tier0 = 0
        self.bytes_from_backends = 0  # reads that had to wait for a fetch
        self.cache_hits = 0  # reads answered at once
        self.cache_misses = 0
        self.read_around = 0  # bytes read around a cache in trouble
        self.node_hits = 0
        self.node_misses = 0
        self.siblings_fetched = 0  # files
        self.siblings_used = 0
        self.siblings_unused = 0
        self.siblings_bytes = 0
        self.stale = 0  # reads that met a changed source

    def snapshot(self) -> dict[str, object]:
        """JSON-ready copy; devices by number."""
        result: dict[str, object] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Counter):
                result[name] = {str(key): count for key, count in sorted(value.items())}
            else:
                result[name] = value
        return result
