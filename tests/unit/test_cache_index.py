"""The index log: golden bytes, damage at every byte, compaction, newer schemas."""

import os
import struct
from threading import Lock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfs.cache.index import (
    CLEAN_FRAME,
    Frame,
    Index,
    Kind,
    Record,
    Start,
    charge_of,
    encode_record,
    start_frame,
)
from hsfs.core.errors import Unsupported

KEYS = [bytes([n]) * 16 for n in range(1, 9)]
START = Start(3, 2, b"boot")


def record(n, *, hashes=b"h" * 16):
    return Record(b"version-%d" % n, n * 1000, 3, 1, 2, n * 1000, 4, 5, b"", hashes)


def file_frame(key, n, units=1):
    return Frame(Kind.FILE, key, units, encode_record(record(n)))


@pytest.fixture
def folder(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def reopened(folder):
    index = Index(folder, Lock())
    return index, index.load()


def filled(folder):
    index, _ = reopened(folder)
    index.append([start_frame(START)])
    for n, key in enumerate(KEYS):
        index.entries[key] = 1
        index.append([file_frame(key, n, units=n + 1)])
    return index


def test_golden_bytes(folder, tmp_path):
    """The format of schema 1. A change of these bytes is a change of the schema."""
    index, _ = reopened(folder)
    index.entries[KEYS[0]] = 1
    index.append([start_frame(START), file_frame(KEYS[0], 1, 25), CLEAN_FRAME])
    index.close()
    raw = (tmp_path / "index").read_bytes()
    assert raw[:32] == b"hsfs tier0 index" + struct.pack("<I", 1) + bytes(12)
    assert raw[36 : 36 + 28] == struct.pack("<IB3xI16s", 9, 1, 0, bytes(16))
    assert raw[64:73] == bytes.fromhex("930302c404") + b"boot"
    assert raw[73 + 4 : 73 + 32][4:] == struct.pack("<B3xI16s", 3, 25, KEYS[0])
    assert raw[-28:] == struct.pack("<IB3xI16s", 0, 2, 0, bytes(16))


def test_what_was_appended_is_there_again(folder):
    filled(folder).close()
    index, loaded = reopened(folder)
    assert loaded.start == START
    assert not loaded.clean
    assert list(index.entries) == KEYS
    for n, key in enumerate(KEYS):
        assert index.read(key) == record(n)
        assert charge_of(index.entries[key]) == (n + 1) * 4096
    index.append([CLEAN_FRAME])
    index.close()
    index, loaded = reopened(folder)
    assert loaded.clean
    index.append([start_frame(START)])
    index.close()
    assert not reopened(folder)[1].clean


def test_newest_record_counts_and_dropped_keys_are_gone(folder):
    index = filled(folder)
    index.append([Frame(Kind.SEGMENT, KEYS[1], 7, b"s" * 4096), file_frame(KEYS[1], 50)])
    index.forget(KEYS[0])
    index.append([Frame(Kind.DROP, KEYS[0], 0, b"")])
    index.close()
    index, _ = reopened(folder)
    assert list(index.entries) == KEYS[1:]
    assert index.read(KEYS[0]) is None
    assert index.read(KEYS[1]) == record(50)
    assert index.segment(KEYS[1], 7) == b"s" * 4096
    assert index.segment(KEYS[1], 6) is None
    index.close()


def test_a_key_evicted_before_its_record_was_written_stays_gone(folder):
    index = filled(folder)
    index.forget(KEYS[0])
    index.append([file_frame(KEYS[0], 9)])
    assert index.read(KEYS[0]) is None
    index.close()


@given(st.data())
def test_damage_is_noticed_and_never_believed(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("index")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        index = filled(fd)
        index.append([CLEAN_FRAME])
        index.close()
        raw = bytearray((path / "index").read_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["flip", "cut", "zero tail", "append"]))
        if how == "flip":
            raw[at] ^= data.draw(st.integers(1, 255))
        elif how == "cut":
            del raw[at:]
        elif how == "zero tail":
            raw[at:] = bytes(len(raw) - at)
        else:
            raw += b"\0" * (at + 1)
        (path / "index").write_bytes(raw)
        index, loaded = reopened(fd)
        # Only flips of bytes that mean nothing (the header's padding) may go unnoticed.
        if not (how == "flip" and 20 <= at < 32):
            assert not loaded.clean
        for n, key in enumerate(KEYS):
            if key in index.entries:
                assert index.read(key) == record(n)
        # The log is usable at once, and whole after the next start.
        index.append([start_frame(START), CLEAN_FRAME])
        index.close()
        index, loaded = reopened(fd)
        assert loaded.clean
        index.close()
    finally:
        os.close(fd)


def test_damage_of_a_record_in_use_is_noticed(folder, tmp_path):
    index = filled(folder)
    raw = bytearray((tmp_path / "index").read_bytes())
    at = raw.index(b"version-3")
    raw[at] ^= 1
    (tmp_path / "index").write_bytes(raw)
    assert index.read(KEYS[3]) is None
    assert index.read(KEYS[4]) == record(4)
    index.close()


def test_a_newer_schema_is_refused_by_name(folder, tmp_path):
    (tmp_path / "index").write_bytes(b"hsfs tier0 index" + struct.pack("<I", 2) + bytes(12))
    with pytest.raises(Unsupported, match="newer version"):
        Index(folder, Lock())
    assert (tmp_path / "index").stat().st_size == 32


def test_compaction_keeps_what_lives(folder, tmp_path):
    index = filled(folder)
    for turn in range(600):
        index.append([file_frame(key, turn % 7) for key in KEYS])
    index.append([Frame(Kind.SEGMENT, KEYS[2], n, bytes([n]) * 4096) for n in range(3)])
    size = (tmp_path / "index").stat().st_size
    index.forget(KEYS[5])
    assert index.compact(START)
    assert not index.compact(START)
    assert (tmp_path / "index").stat().st_size < size / 10
    live = [key for key in KEYS if key != KEYS[5]]
    for _ in range(2):
        for key in live:
            assert index.read(key) == record(599 % 7)
        assert index.read(KEYS[5]) is None
        assert index.segment(KEYS[2], 2) == b"\2" * 4096
        index.append([file_frame(live[0], 599 % 7)])
        index.close()
        index, loaded = reopened(folder)
        assert loaded.start == START
        assert sorted(index.entries) == sorted(live)
    index.close()


def test_an_append_that_fails_changes_nothing(folder):
    index = filled(folder)
    before = dict(index.entries)
    real = index._fds[0]
    broken = os.open("/dev/full", os.O_RDWR)
    index._fds[0] = broken
    with pytest.raises(OSError, match="space"):
        index.append([file_frame(KEYS[0], 77)])
    index._fds[0] = real
    os.close(broken)
    assert index.entries == before
    index.append([file_frame(KEYS[0], 78)])
    assert index.read(KEYS[0]) == record(78)
    index.close()
