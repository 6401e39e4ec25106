"""What is known since when: coverage of directory listings, due or not, and for how long. Pure.

A directory has one `as_of`, that of its last whole listing, and spans that a listing in progress
has renewed since. A file is as fresh as the newest of its own check and its directory's listing, so
that a listing renews thousands of files by one small record.
"""

from __future__ import annotations

from collections.abc import Iterable

from hsfs.core.names import LEAD
from hsfs.core.types import FileType
from hsfs.mdserver.schema import Coverage, Span

SPANS_MAX = 64
WEAK_NS = 2_000_000_000  # a version with a ctime younger than this may change unnoticed


def sort_key(segment: bytes, kind: int, flat: bool) -> bytes:
    """What native listings are ordered by: prefixes of object stores with their `/`."""
    return segment + b"/" if flat and kind == FileType.DIRECTORY else segment


def within(key: bytes, after: bytes, upto: bytes) -> bool:
    """Whether a sort key lies in (after, upto]; `after` b"" includes the key b"" itself."""
    return (key > after or not after) and (not upto or key <= upto)


def known_since(coverage: Coverage | None, key: bytes) -> int:
    """When the listing last spoke of `key` (ns; 0 = never)."""
    if coverage is None:
        return 0
    as_of_ns = coverage.as_of_ns
    for span in coverage.spans:
        if span.as_of_ns > as_of_ns and within(key, span.after, span.upto):
            as_of_ns = span.as_of_ns
    return as_of_ns


def overtaken(coverage: Coverage | None, after: bytes, upto: bytes, as_of_ns: int) -> bool:
    """Whether some of the range was listed by something that began later."""
    if coverage is None:
        return False
    return coverage.as_of_ns > as_of_ns or any(
        span.as_of_ns > as_of_ns and _overlap(span, after, upto) for span in coverage.spans
    )


def overlaps(coverage: Coverage | None, after: bytes, upto: bytes) -> bool:
    """Whether anything of the range was listed before."""
    if coverage is None:
        return False
    return coverage.as_of_ns > 0 or any(_overlap(one, after, upto) for one in coverage.spans)


def covered(coverage: Coverage | None, span: Span, delta: int) -> Coverage:
    """The coverage after one more page; `delta`: how many entries it added or took away."""
    if coverage is None:
        coverage = Coverage(1)
    entries = max(0, coverage.entries + delta)
    if not span.after and not span.upto:
        return Coverage(1, span.as_of_ns, entries)
    spans = [part for old in coverage.spans for part in _minus(old, span)]
    spans.append(span)
    spans = _joined(sorted(spans, key=lambda one: one.after))
    as_of_ns = coverage.as_of_ns
    if _whole(spans):
        as_of_ns = max(as_of_ns, min(one.as_of_ns for one in spans))
    return Coverage(1, as_of_ns, entries, tuple(s for s in spans if s.as_of_ns > as_of_ns))


def frontier(coverage: Coverage | None, need_ns: int) -> bytes | None:
    """How far from the start the directory was listed at or after `need_ns`: b"" = whole, None =
    not even its start."""
    if coverage is None:
        return None
    if coverage.as_of_ns and coverage.as_of_ns >= need_ns:
        return b""
    reached: bytes | None = None
    for span in coverage.spans:
        if span.after != (reached or b"") or span.as_of_ns < need_ns:
            break
        reached = span.upto
        if not reached:
            return b""
    return reached


def safe_name(reached: bytes, flat: bool) -> bytes:
    """Of the names that do not begin with an escape, those below this one are complete when
    native sort keys up to `reached` are: a later key may have a name that sorts earlier (the
    prefix `a/` comes behind `a.txt`, a literal `%~` is shown as `%~25%~7E`)."""
    bound = reached
    if flat:
        for at in range(1, len(reached)):
            if reached[at] < 0x2F:
                bound = reached[:at]
                break
    lead = bound.find(LEAD)
    return bound if lead < 0 else bound[: lead + 1]


def ttl_s(as_of_ns: int, now_ns: int, freshness_ns: int, lease_s: float) -> float:
    """For how long an answer may be used (seconds)."""
    left_s = (as_of_ns + freshness_ns - now_ns) / 1e9
    return max(0.0, min(left_s, lease_s))


def relist_is_cheaper(entries: int, due_names: int) -> bool:
    """Whether one more due name of a directory of `entries` is worth listing all of it: a request
    of a listing tells a thousand entries, a stat one; both cost about a round trip."""
    return entries <= 256 * max(1, due_names)


def _overlap(span: Span, after: bytes, upto: bytes) -> bool:
    return (not span.upto or after < span.upto) and (not upto or span.after < upto)


def _minus(old: Span, new: Span) -> Iterable[Span]:
    if not _overlap(old, new.after, new.upto):
        yield old
        return
    if old.after < new.after:
        yield Span(old.after, new.after, old.as_of_ns)
    if new.upto and (not old.upto or old.upto > new.upto):
        yield Span(new.upto, old.upto, old.as_of_ns)


def _joined(spans: list[Span]) -> list[Span]:
    out: list[Span] = []
    for span in spans:
        if out and out[-1].upto == span.after and out[-1].as_of_ns == span.as_of_ns:
            out[-1] = Span(out[-1].after, span.upto, span.as_of_ns)
        else:
            out.append(span)
    while len(out) > SPANS_MAX:  # forget the oldest: it will be listed again
        del out[min(range(len(out)), key=lambda at: out[at].as_of_ns)]
    return out


def _whole(spans: list[Span]) -> bool:
    reached = b""
    for at, span in enumerate(spans):
        if span.after != reached or (at and not reached):
            return False
        reached = span.upto
        if not reached:
            return at == len(spans) - 1
    return False
