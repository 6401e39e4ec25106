"""Fill buffers: reused while they are hot, bounded, and given back when idle."""

import pytest

from hsfs.cache import buffers
from hsfs.cache.buffers import BUFFER_SIZE, Buffers
from hsfs.core.errors import CacheUnavailable


def test_the_last_given_is_taken_next():
    stack = Buffers()
    first, second = stack.take(), stack.take()
    assert len(first) == BUFFER_SIZE
    assert not first.readonly
    stack.give(first)
    stack.give(second)
    assert stack.take() is second
    assert stack.take() is first


def test_no_more_than_the_limit(monkeypatch):
    monkeypatch.setattr(buffers, "WAIT_S", 0.01)
    stack = Buffers(1)
    held = stack.take()
    with pytest.raises(CacheUnavailable):
        stack.take()
    stack.give(held)
    assert stack.take() is held


def test_idle_buffers_are_freed_and_busy_ones_are_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(buffers.time, "monotonic", lambda: now[0])
    stack = Buffers()
    one = stack.take()
    stack.give(one)
    stack.tidy()
    assert stack.take() is one
    stack.give(one)
    now[0] += buffers.IDLE_S + 1
    stack.tidy()
    assert stack.take() is not one
