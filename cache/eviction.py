"""SIEVE: which cache file goes next. Pure: no I/O, no clock, no sizes.

The queue is walked by a hand from the oldest to the newest key. A key that was touched since the
hand last passed loses its mark and stays in place; an unmarked one goes. Keys enter at the young
end and never move, so that a hit costs a set insertion and a scan over cold data can't push out
what is used again (a scanned key is never touched, and goes when the hand reaches it).

The queue is two deques: `_passed` (behind the hand, older) and `_ahead`. When the hand reaches the
young end they change places. A key discarded from the middle stays queued as a ghost until the
hand meets it; if it is added again before, it takes its old place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Sieve:
    """Eviction order over opaque keys. The caller knows which keys exist and which are pinned."""

    __slots__ = ("_ahead", "_ghosts", "_passed", "_visited")

    def __init__(self) -> None:
        self._ahead: deque[bytes] = deque()
        self._passed: deque[bytes] = deque()
        self._visited: set[bytes] = set()
        self._ghosts: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._ahead) + len(self._passed) - len(self._ghosts)

    def add(self, key: bytes) -> None:
        """Queue a key that is not queued."""
        if key in self._ghosts:
            self._ghosts.discard(key)
        else:
            self._ahead.append(key)

    def touch(self, key: bytes) -> None:
        """A queued key was used."""
        self._visited.add(key)

    def discard(self, key: bytes) -> None:
        """Forget a queued key."""
        self._visited.discard(key)
        self._ghosts.add(key)
        if len(self._ghosts) > 1024 and len(self._ghosts) > len(self):
            self._bury()

    def evict(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """Take the next victim out of the queue; None when no key may go.

        A key that is not evictable (pinned) keeps its place and its mark.
        """
        # Two rounds clear every mark; a third could only meet pinned keys again.
        for _ in range(2 * (len(self._ahead) + len(self._passed))):
            if not self._ahead:
                self._ahead, self._passed = self._passed, self._ahead
                if not self._ahead:
                    break  # all that was left were ghosts
            key = self._ahead.popleft()
            if key in self._ghosts:
                self._ghosts.discard(key)
            elif not evictable(key):
                self._passed.append(key)
            elif key in self._visited:
                self._visited.discard(key)
                self._passed.append(key)
            else:
                return key
        return None

    def _bury(self) -> None:
        """Take all ghosts out: keeps the queue within twice the number of keys."""
        self._ahead = deque(k for k in self._ahead if k not in self._ghosts)
        self._passed = deque(k for k in self._passed if k not in self._ghosts)
        self._ghosts.clear()
