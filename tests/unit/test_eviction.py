"""SIEVE against a list with a hand, the textbook form."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hsfs.cache.eviction import Sieve


def key(n):
    return n.to_bytes(2, "big")


class Textbook:
    """Queue from old to young; `hand` is the position to look at next. A discarded key stays as a
    ghost and takes its old place if it comes back before the hand has passed."""

    def __init__(self):
        self.queue = []
        self.hand = 0
        self.visited = set()
        self.ghosts = set()

    def evict(self, pinned):
        for _ in range(2 * len(self.queue)):
            if self.hand >= len(self.queue):
                self.hand = 0
                if not self.queue:
                    break
            found = self.queue[self.hand]
            if found in self.ghosts:
                self.ghosts.discard(found)
                del self.queue[self.hand]
            elif found in pinned:
                self.hand += 1
            elif found in self.visited:
                self.visited.discard(found)
                self.hand += 1
            else:
                del self.queue[self.hand]
                return found
        return None


class SieveMachine(RuleBasedStateMachine):
    keys = Bundle("keys")

    def __init__(self):
        super().__init__()
        self.sieve = Sieve()
        self.model = Textbook()
        self.pinned = set()
        self.live = set()

    @rule(target=keys, n=st.integers(0, 30))
    def add(self, n):
        name = key(n)
        if name not in self.live:
            self.live.add(name)
            self.sieve.add(name)
            if name in self.model.ghosts:
                self.model.ghosts.discard(name)
            else:
                self.model.queue.append(name)
        return name

    @rule(name=keys)
    def touch(self, name):
        if name in self.live:
            self.sieve.touch(name)
            self.model.visited.add(name)

    @rule(name=consumes(keys))
    def discard(self, name):
        if name in self.live:
            self.live.discard(name)
            self.sieve.discard(name)
            self.model.visited.discard(name)
            self.model.ghosts.add(name)

    @rule(name=keys)
    def pin_or_unpin(self, name):
        self.pinned ^= {name}

    @rule()
    def evict(self):
        victim = self.sieve.evict(lambda name: name not in self.pinned)
        assert victim == self.model.evict(self.pinned)
        if victim is None:
            assert self.live <= self.pinned
        else:
            assert victim not in self.pinned
            self.live.discard(victim)

    @invariant()
    def counts(self):
        assert len(self.sieve) == len(self.live)


TestSieve = SieveMachine.TestCase
TestSieve.settings = settings(max_examples=150, stateful_step_count=60)


def test_a_scan_passes_by_what_is_used():
    sieve = Sieve()
    for n in range(10):
        sieve.add(key(n))
    for n in range(10, 2000):
        for hot in range(10):
            sieve.touch(key(hot))
        sieve.add(key(n))
        victim = sieve.evict(lambda _: True)
        assert victim is not None
        assert int.from_bytes(victim, "big") >= 10


def test_ghosts_do_not_pile_up():
    sieve = Sieve()
    for n in range(20_000):
        sieve.add(key(n))
        if n >= 100:
            sieve.discard(key(n - 100))
    assert len(sieve) == 100
    assert len(sieve._ahead) + len(sieve._passed) < 5000


def test_all_pinned_gives_none():
    sieve = Sieve()
    for n in range(5):
        sieve.add(key(n))
    assert sieve.evict(lambda _: False) is None
    assert sieve.evict(lambda _: True) == key(0)
