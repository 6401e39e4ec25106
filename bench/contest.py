"""Contests: contenders take turns within each round; medians, ratios round by round, spread.

These machines are shared and noisy: absolute figures mean little, so the quoted figure is the
median of the ratios of single rounds. A ratio whose spread ((max - min) / median, without the
furthest outlier) exceeds 25 % is run again, at most `RERUNS` times, and printed with its spread.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

ROUNDS = 5
RERUNS = 1
SPREAD_MAX = 0.25


@dataclass(frozen=True)
class Turn:
    """One contender's turn: `value` is bigger-is-better; `cpu` names CPU seconds spent."""

    value: float
    cpu: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Contest:
    """Results by contender, one list entry a round."""

    turns: dict[str, list[Turn]]
    load: float

    def median(self, name: str) -> float:
        return statistics.median(turn.value for turn in self.turns[name])

    def best(self, names: list[str]) -> str:
        """The contender with the highest median."""
        return max(names, key=self.median)

    def ratios(self, name: str, other: str) -> list[float]:
        pairs = zip(self.turns[name], self.turns[other], strict=True)
        return [mine.value / theirs.value for mine, theirs in pairs]

    def ratio(self, name: str, other: str) -> float:
        return statistics.median(self.ratios(name, other))

    def spread(self, name: str, other: str) -> float:
        ratios = sorted(self.ratios(name, other))
        middle = statistics.median(ratios)
        if len(ratios) > 3:
            ratios.remove(max(ratios, key=lambda ratio: abs(ratio - middle)))
        return (ratios[-1] - ratios[0]) / middle

    def cpu(self, name: str) -> dict[str, float]:
        """Median CPU seconds by process kind."""
        kinds = self.turns[name][0].cpu
        return {k: statistics.median(t.cpu.get(k, 0.0) for t in self.turns[name]) for k in kinds}


def hold(
    contenders: Mapping[str, Callable[[], Turn]],
    *,
    rounds: int = ROUNDS,
    against: Callable[[Contest], list[tuple[str, str]]] | None = None,
) -> Contest:
    """Run the contenders in turn, `rounds` times; again when a ratio of `against` spreads wide."""
    for attempt in range(RERUNS + 1):
        loads = []
        turns: dict[str, list[Turn]] = {name: [] for name in contenders}
        for number in range(rounds):
            for name, run in contenders.items():
                loads.append(os.getloadavg()[0])
                turn = run()
                turns[name].append(turn)
                note(f"round {number + 1}/{rounds}  {name:<24} {turn.value:12.4g}")
        contest = Contest(turns, statistics.median(loads))
        pairs = against(contest) if against is not None else []
        wide = [pair for pair in pairs if contest.spread(*pair) > SPREAD_MAX]
        if not wide or attempt == RERUNS or rounds < 3:
            return contest
        note(f"spread over {SPREAD_MAX:.0%} for {wide}: once more")
    raise AssertionError("unreachable")


def note(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
