import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfs.core.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("4M", 4 << 20),
        ("4m", 4 << 20),
        ("1G", 1 << 30),
        ("500G", 500 << 30),
        ("64KiB", 64 << 10),
        ("2TB", 2 << 40),
        ("1.5G", 3 << 29),
        (" 8 K ", 8192),
        ("9B", 9),
        ("1P", 1 << 50),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "M", "-1", "1.G", "4 MM", "4X", "1e3", "0x10", "9999999999P", "½G"]
)
def test_bad_sizes(text):
    with pytest.raises(ValueError, match=r"size|large"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("30s", 30),
        ("5m", 300),
        ("12h", 43200),
        ("7d", 604800),
        ("250ms", 0.25),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("1w", 604800),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "30", "s", "-1s", "5 m", "1h 30m", "3y", "1hh", "m5"])
def test_bad_durations(text):
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@given(st.integers(0, 1 << 61))
def test_a_formatted_size_is_near_what_it_says(size):
    text = format_size(size)
    assert len(text) <= 7
    if text[-1] != "E":
        assert parse_size(text) == pytest.approx(size, rel=0.06, abs=1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0, "0ms"),
        (0.2504, "250ms"),
        (12.4, "12s"),
        (200, "3m20s"),
        (7500, "2h05m"),
        (273600, "3d04h"),
    ],
)
def test_formatted_durations(seconds, text):
    assert format_duration(seconds) == text
