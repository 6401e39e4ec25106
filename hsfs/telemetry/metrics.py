"""Counters, gauges and histograms, and their Prometheus text.

Small on purpose: an increment on the data path is one dictionary-free addition on an object that
the caller keeps. Additions from several threads may lose one another's step once in a great while
(`+=` is not atomic); counts that must be exact are kept under their owner's lock and given here as
callables. No per-path labels.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

Labels = tuple[tuple[str, str], ...]

# Spans that users of other file systems know: exponential, 10 us * 1.8^n, 29 of them.
FUSE_BUCKETS_S = tuple(1e-5 * 1.8**n for n in range(29))
METADATA_BUCKETS_S = tuple(1e-4 * 1.5**n for n in range(30))
BACKEND_BUCKETS_S = tuple(1e-2 * 1.5**n for n in range(25))


class Counter:
    """Grows only. `add` is the whole cost."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        """Add `amount`."""
        self.value += amount


class Histogram:
    """Counts of observations per upper bound (seconds or bytes)."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


class _Family:
    __slots__ = ("children", "help", "kind")

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        self.help = text
        self.children: dict[Labels, Counter | Histogram | Callable[[], float]] = {}


class Registry:
    """All metrics of one process. Asking for the same name and labels again gives the same one."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def _family(self, name: str, kind: str, text: str) -> _Family:
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = _Family(kind, text)
        if family.kind != kind:
            raise ValueError(f"{name} is a {family.kind}, not a {kind}")
        return family

    def counter(self, name: str, text: str, /, **labels: str) -> Counter:
        """A counter; its name ends in `_total`."""
        family = self._family(name, "counter", text)
        child = family.children.setdefault(_labels(labels), Counter())
        assert isinstance(child, Counter)
        return child

    def histogram(
        self, name: str, text: str, bounds: Sequence[float], /, **labels: str
    ) -> Histogram:
        """A histogram with these upper bounds."""
        family = self._family(name, "histogram", text)
        child = family.children.setdefault(_labels(labels), Histogram(bounds))
        assert isinstance(child, Histogram)
        return child

    def gauge(self, name: str, text: str, read: Callable[[], float], /, **labels: str) -> None:
        """A value read when asked for; the newest callable of a name and labels counts."""
        self._family(name, "gauge", text).children[_labels(labels)] = read

    def counter_from(
        self, name: str, text: str, read: Callable[[], float], /, **labels: str
    ) -> None:
        """A counter that its owner keeps; read when asked for."""
        self._family(name, "counter", text).children[_labels(labels)] = read

    def values(self) -> Mapping[str, float]:
        """Counters and gauges by `name{labels}`, for `stats`; histograms as their count."""
        found: dict[str, float] = {}
        for name, family in sorted(self._families.items()):
            for labels, child in sorted(family.children.items()):
                found[name + _text(labels)] = _value(child)
        return found

    def render(self) -> bytes:
        """The Prometheus text format, version 0.0.4."""
        lines: list[str] = []
        for name, family in sorted(self._families.items()):
            lines.append(f"# HELP {name} {_escape(family.help, quote=False)}")
            lines.append(f"# TYPE {name} {family.kind}")
            for labels, child in sorted(family.children.items()):
                if isinstance(child, Histogram):
                    lines.extend(_histogram(name, labels, child))
                else:
                    lines.append(f"{name}{_text(labels)} {_number(_value(child))}")
        return "\n".join([*lines, ""]).encode()


def _labels(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))


def _value(child: Counter | Histogram | Callable[[], float]) -> float:
    if isinstance(child, Counter):
        return child.value
    if isinstance(child, Histogram):
        return child.count
    return child()


def _escape(text: str, *, quote: bool) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text


def _text(labels: Labels) -> str:
    if not labels:
        return ""
    inner = ",".join(f'{key}="{_escape(value, quote=True)}"' for key, value in labels)
    return "{" + inner + "}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


def _histogram(name: str, labels: Labels, histogram: Histogram) -> Iterable[str]:
    running = 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        running += count
        at = (*labels, ("le", _number(bound)))
        yield f"{name}_bucket{_text(at)} {running}"
    yield f"{name}_sum{_text(labels)} {_number(histogram.total)}"
    yield f"{name}_count{_text(labels)} {running}"
