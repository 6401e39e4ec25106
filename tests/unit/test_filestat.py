"""Versions of files, and when one is trusted."""

import time

import pytest

from hsfs.backends import filestat
from hsfs.backends.filestat import ServerClock, pack_identity, pack_version, unpack_version
from hsfs.core.errors import ProtocolError

SECOND = 1_000_000_000


def test_each_field_makes_another_version():
    base = (7, 100, 10**18, 10**18 + 5)
    versions = {pack_version(*base)}
    for i in range(4):
        fields = list(base)
        fields[i] += 1
        versions.add(pack_version(*fields))
    assert len(versions) == 5
    assert unpack_version(pack_version(*base)) == base
    assert unpack_version(pack_version(1, 2, -5, -6)) == (1, 2, -5, -6)
    with pytest.raises(ProtocolError):
        unpack_version(b"etag")


def test_identities_are_16_bytes_for_any_number():
    assert pack_identity(2**64 + 1, 3) == pack_identity(1, 3)
    assert len(pack_identity(2**64 - 1, 2**64 - 1)) == 16


def test_this_machine_s_clock():
    now = time.time_ns()
    assert not filestat.settled(now)
    assert not filestat.settled(now + 3600 * SECOND)
    assert filestat.settled(now - 3 * SECOND)


@pytest.mark.parametrize("skew_s", [-50, 0, 50])
def test_a_server_s_clock_that_is_wrong(skew_s, monkeypatch):
    """A file is settled two seconds after its ctime by the server's clock, never earlier."""
    local, monotonic = 10**18, 500 * SECOND
    monkeypatch.setattr(filestat.time, "time_ns", lambda: local)
    monkeypatch.setattr(filestat.time, "monotonic_ns", lambda: monotonic)
    clock = ServerClock()
    server = local + skew_s * SECOND
    assert not clock.settled(server)
    assert clock.settled(server - 2 * SECOND)
    local, monotonic = local + SECOND, monotonic + SECOND
    assert not clock.settled(server)
    assert not clock.settled(server - SECOND // 2)
    local, monotonic = local + SECOND, monotonic + SECOND
    assert clock.settled(server)


def test_the_newest_file_of_an_old_tree_is_settled_at_once():
    assert ServerClock().settled(time.time_ns() - 3600 * SECOND)
