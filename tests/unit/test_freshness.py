"""Coverage of listings: an algebra of ranges, checked against sets of keys with their times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfs.core.types import FileType
from hsfs.mdserver.freshness import (
    covered,
    frontier,
    known_since,
    overtaken,
    relist_is_cheaper,
    safe_name,
    sort_key,
    ttl_s,
    within,
)
from hsfs.mdserver.schema import Coverage, Span

KEYS = [b"", b"a", b"a.x", b"a/", b"b", b"c", b"d", b"e"]
RANGES = st.tuples(st.sampled_from(KEYS), st.sampled_from(KEYS)).filter(
    lambda one: not one[1] or one[0] < one[1]
)


@given(st.lists(st.tuples(RANGES, st.integers(0, 3)), max_size=12))
def test_a_coverage_knows_what_its_pages_said(pages):
    coverage = None
    model: dict[bytes, int] = {}
    now_ns = 10
    for (after, upto), step in pages:
        now_ns += step
        assert not overtaken(coverage, after, upto, now_ns)
        coverage = covered(coverage, Span(after, upto, now_ns), 1)
        for key in KEYS:
            if within(key, after, upto):
                model[key] = now_ns
    for key in KEYS:
        # A whole listing is as old as its oldest page: never newer than the truth.
        assert known_since(coverage, key) == model.get(key, 0)
    if coverage is not None:
        assert coverage.entries == len(pages)
        whole = min(model.get(key, 0) for key in [*KEYS, b"zzz"] if key in model) if model else 0
        if coverage.as_of_ns:
            assert coverage.as_of_ns <= whole
        for need_ns in range(9, now_ns + 2):
            reached = frontier(coverage, need_ns)
            for key in KEYS:
                if reached is not None and within(key, b"", reached):
                    assert model[key] >= need_ns


def test_a_pass_in_pages_ends_whole():
    coverage = covered(None, Span(b"", b"m", 5), 3)
    assert (coverage.as_of_ns, frontier(coverage, 5)) == (0, b"m")
    coverage = covered(coverage, Span(b"m", b"", 5), 2)
    assert coverage == Coverage(1, 5, 5)
    assert frontier(coverage, 5) == b""
    assert frontier(coverage, 6) is None
    # A second pass renews it piece by piece, in any order.
    coverage = covered(coverage, Span(b"k", b"", 9), 0)
    assert (known_since(coverage, b"z"), known_since(coverage, b"a")) == (9, 5)
    assert frontier(coverage, 9) is None
    coverage = covered(coverage, Span(b"", b"k", 9), 0)
    assert coverage == Coverage(1, 9, 5)
    assert overtaken(coverage, b"", b"c", 8)
    assert not overtaken(coverage, b"", b"c", 9)


def test_many_pieces_are_bounded():
    coverage = None
    for at in range(1000):
        coverage = covered(coverage, Span(b"%04d" % (2 * at), b"%04d" % (2 * at + 1), at), 0)
    assert coverage is not None
    assert len(coverage.spans) <= 64
    assert known_since(coverage, b"1999") == 999


@pytest.mark.parametrize(
    ("reached", "flat", "bound"),
    [
        (b"img_5", True, b"img_5"),
        (b"a.txt", True, b"a"),  # the prefix a/ may follow
        (b"a.txt", False, b"a.txt"),
        (b"a/", True, b"a/"),
        (b"x-y.z", True, b"x"),
        (b"a%~b", False, b"a%"),  # a%~c is shown as a%~25%~7Ec
    ],
)
def test_names_that_are_safe_to_show(reached, flat, bound):
    assert safe_name(reached, flat) == bound


def test_sort_keys():
    assert sort_key(b"a", FileType.DIRECTORY, True) == b"a/"
    assert sort_key(b"a", FileType.DIRECTORY, False) == b"a"
    assert sort_key(b"a", FileType.FILE, True) == b"a"


def test_time_to_live():
    second = 1_000_000_000
    assert ttl_s(10 * second, 10 * second, 60 * second, 30.0) == 30.0
    assert ttl_s(10 * second, 60 * second, 60 * second, 30.0) == 10.0
    assert ttl_s(10 * second, 99 * second, 60 * second, 30.0) == 0.0


def test_listing_or_stat():
    assert relist_is_cheaper(100, 1)
    assert not relist_is_cheaper(100_000, 1)
    assert relist_is_cheaper(100_000, 500)
