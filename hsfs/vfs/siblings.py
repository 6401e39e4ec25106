"""Which files of a directory will be opened next: pure bookkeeping over the order of opens.

Training data lies in directories of thousands of small files that are opened in the order in which
the directory lists them, one after the other by a single thread. Each open would wait for a round
trip; fetched a few dozen ahead, the reader runs at the pace of the pipeline. A directory earns its
lookahead by three opens in order and loses it with the first open out of order; what is fetched and
never opened is counted, and when it outweighs what was used the guessing stops for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hsfs.vfs.counters import Counters
from hsfs.vfs.inodes import Inode, Run

_STRIDE = 4  # entries skipped between two opens that still count as in order
_STREAK = 2
_FIRST_DEPTH = 8
_SLACK = 64
_DIRECTORIES = 64


@dataclass(slots=True)
class _Walk:
    """One directory being walked: `ahead` entries behind the last opened one are taken care of,
    up to (`run`, `position`)."""

    last_run: Run
    last: int
    run: Run
    position: int
    streak: int = 0
    ahead: int = 0
    depth: int = _FIRST_DEPTH


@dataclass(frozen=True, slots=True)
class Ahead:
    """`inos` to fetch now, in order; `page`: the run behind which the next page is missing."""

    inos: tuple[int, ...]
    page: Run | None = None


NOTHING = Ahead(())


class Siblings:
    """`next_run` finds the page behind one; `depth` bounds the lookahead (entries)."""

    def __init__(
        self, depth: int, counters: Counters, next_run: Callable[[Run], Run | None]
    ) -> None:
        self._depth = depth
        self._counters = counters
        self._next_run = next_run
        self._walks: dict[int, _Walk] = {}
        self._used = 0
        self._unused = 0
        self._refused = 0

    def opened(self, inode: Inode) -> Ahead:
        """A small file was opened."""
        run = inode.run
        if run is None or self._depth <= 0:
            return NOTHING
        position = inode.position
        walk = self._walks.get(run.directory)
        if walk is None:
            if len(self._walks) >= _DIRECTORIES:
                del self._walks[next(iter(self._walks))]
            self._walks[run.directory] = _Walk(run, position, run, position + 1)
            return NOTHING
        step = self._step(walk, run, position)
        walk.last_run, walk.last = run, position
        if not 0 < step <= _STRIDE:
            walk.streak = walk.ahead = 0
            walk.depth = _FIRST_DEPTH
            walk.run, walk.position = run, position + 1
            return NOTHING
        walk.streak += 1
        if walk.ahead >= step:
            walk.ahead -= step
        else:
            walk.ahead = 0
            walk.run, walk.position = run, position + 1
        if walk.streak < _STREAK or walk.ahead * 2 > walk.depth or not self._allowed():
            return NOTHING
        result = self._extend(walk)
        if walk.streak > _STREAK:
            walk.depth = min(walk.depth * 2, self._depth)
        return result

    def _step(self, walk: _Walk, run: Run, position: int) -> int:
        if run is walk.last_run or run.after == walk.last_run.after:
            return position - walk.last
        if run.after == walk.last_run.last:
            return len(walk.last_run.names) - walk.last + position
        return 0

    def _extend(self, walk: _Walk) -> Ahead:
        inos: list[int] = []
        page: Run | None = None
        while walk.ahead < min(walk.depth, self._depth):
            if walk.position >= len(walk.run.inos):
                following = self._next_run(walk.run)
                if following is None:
                    page = walk.run if walk.run.more else None
                    break
                walk.run, walk.position = following, 0
                continue
            inos.append(walk.run.inos[walk.position])
            walk.position += 1
            walk.ahead += 1
        if page is None and walk.run.more and len(walk.run.inos) - walk.position < 2 * self._depth:
            page = walk.run if self._next_run(walk.run) is None else None
        return Ahead(tuple(inos), page)

    def _allowed(self) -> bool:
        used = self._counters.siblings_used - self._used
        unused = self._counters.siblings_unused - self._unused
        if unused * 2 <= used + _SLACK:
            return True
        self._refused += 1
        if self._refused >= 1024:
            self._refused = 0
            self._used = self._counters.siblings_used
            self._unused = self._counters.siblings_unused
        return False
