"""How often the drafts of one kind are accepted, position by position, in a world that changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PRIOR_MEAN, PRIOR_WEIGHT = 0.6, 2.0  # of a position that nothing is known about
NEXT_POSITION = 0.95  # conditional acceptance falls slowly along a draft (fig. 16 of the TLT paper: 0.96 -> 0.7)
WINDOW_TRIES, WINDOW_ROUNDS = 1000.0, 400.0  # what is remembered, whichever ends first
WANDERS = 20_000.0  # without a round of its own, what n rounds ago was known is worth this / n tries at most
_QUICK_TRIES, _QUICK_ROUNDS = 96.0, 24.0
_JUMP = 4.0  # standard deviations between the quick and the long window that are no chance
_AFTER_JUMP = 12.0  # tries that are left then, of the quick window, which holds some from before as well
_SAME_ROUNDS = 32  # rounds without one of its own that make no difference worth computing
_DOUBT = 1.0  # tries that are left of a position's memory when its drafter changed


@dataclass(slots=True)
class Counts:
    """Discounted sums by position. `opportunities[k]`: requests whose first k draft tokens were accepted (k = 0: all);
    `accepted[k]`: those of them whose next one was too. A request without a draft there counts as not accepted, so
    that how often a drafter has something to offer is part of the rate."""

    accepted: list[float] = field(default_factory=list)
    opportunities: list[float] = field(default_factory=list)

    def add(self, accepted: Sequence[float], opportunities: Sequence[float], keep: float) -> None:
        missing = len(accepted) - len(self.accepted)
        self.accepted.extend([0.0] * missing)
        self.opportunities.extend([0.0] * missing)
        for k in range(len(self.accepted)):
            self.accepted[k] *= keep
            self.opportunities[k] *= keep
        for k, (a, o) in enumerate(zip(accepted, opportunities, strict=True)):
            self.accepted[k] += a
            self.opportunities[k] += o

    def fade(self, wandered: float) -> None:
        """The rates took a random walk unseen: n tries are worth 1 / (1/n + wandered)."""
        for k, seen in enumerate(self.opportunities):
            self.accepted[k] /= 1 + seen * wandered
            self.opportunities[k] /= 1 + seen * wandered

    def shrink(self, most: float) -> None:
        """Keep the rates, remember at most `most` opportunities of each position."""
        for k, seen in enumerate(self.opportunities):
            if seen > most:
                self.accepted[k] *= most / seen
                self.opportunities[k] = most

    def state(self) -> list[list[float]]:
        return [list(self.accepted), list(self.opportunities)]

    @classmethod
    def of(cls, state: Sequence[Sequence[float]]) -> Counts:
        accepted, opportunities = state
        return cls(list(accepted), list(opportunities))


class Track:
    """The acceptance of one kind of draft. Its rates are conditional: of position k among those that got there."""

    def __init__(self) -> None:
        self._long, self._quick = Counts(), Counts()
        self._round, self._first = 0, PRIOR_MEAN
        self._seen = 0  # times that the memory changed
        self._known_for, self._known = (-1, -1), (list[float](), list[float]())

    def observe(self, accepted: Sequence[float], opportunities: Sequence[float], now: int) -> None:
        """`now`: number of the round, of all kinds."""
        tries = opportunities[0]
        self._seen += 1
        self._long.fade(max(0, now - self._round - 1) / WANDERS)
        self._round = now
        self._long.add(accepted, opportunities, math.exp(-tries / WINDOW_TRIES - 1 / WINDOW_ROUNDS))
        self._quick.add(accepted, opportunities, math.exp(-tries / _QUICK_TRIES - 1 / _QUICK_ROUNDS))
        if abs(self._surprise()) > _JUMP:
            self._long, self._quick = self._quick, Counts()
            self._long.shrink(_AFTER_JUMP)

    def doubt(self) -> None:
        """The drafter is another one now: its rates are a guess at best, hardly a worse one than before."""
        if self.tries > 0:
            self._first = max(PRIOR_MEAN, self._long.accepted[0] / self._long.opportunities[0])
        self._seen += 1
        self._long.shrink(_DOUBT)
        self._quick = Counts()

    @property
    def tries(self) -> float:
        """What the first position's rate rests on."""
        return self._long.opportunities[0] if self._long.opportunities else 0.0

    def state(self) -> dict[str, Any]:
        """All that it knows, as plain values."""
        return {
            "long": self._long.state(),
            "quick": self._quick.state(),
            "round": self._round,
            "first": self._first,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Track:
        track = cls()
        track._long, track._quick = Counts.of(state["long"]), Counts.of(state["quick"])
        track._round, track._first = state["round"], state["first"]
        return track

    def doubtful_copy(self) -> Track:
        other = Track()
        other._long = Counts(list(self._long.accepted), list(self._long.opportunities))
        other._round = self._round
        other.doubt()
        return other

    def own_rates(self, now: int, depth: int) -> tuple[list[float], list[float]]:
        """Means and standard deviations of the first `depth` positions, each of which starts from the one before."""
        key = (self._seen, now // _SAME_ROUNDS)
        if self._known_for != key or len(self._known[0]) < depth:
            # As of the first of those rounds: what is known then does not depend on when it was asked for first.
            since = now - now % _SAME_ROUNDS
            self._known_for, self._known = key, self._posterior(since, depth, None, PRIOR_WEIGHT)
        return self._known[0][:depth], self._known[1][:depth]

    def rates(self, now: int, prior: Sequence[float], weight: float) -> tuple[list[float], list[float]]:
        """The same with the rates to start from, which are worth `weight` tries."""
        return self._posterior(now, len(prior), prior, weight)

    def _posterior(
        self, now: int, depth: int, prior: Sequence[float] | None, weight: float
    ) -> tuple[list[float], list[float]]:
        """Of a Beta prior, by position."""
        wandered, before = max(0, now - self._round) / WANDERS, self._first / NEXT_POSITION
        means, deviations = list[float](), list[float]()
        known, hits = self._long.opportunities, self._long.accepted
        for k in range(depth):
            seen = known[k] if k < len(known) else 0.0
            keep = 1 / (1 + seen * wandered)
            guess = before * NEXT_POSITION if prior is None else prior[k]
            total = keep * seen + weight
            before = ((keep * hits[k] if seen else 0.0) + weight * guess) / total
            means.append(before)
            deviations.append(math.sqrt(before * (1 - before) / (total + 1)))
        return means, deviations

    def _surprise(self) -> float:
        """By how many standard deviations the quick window's accepted drafts differ from what the long one says."""
        expected, variance, found = 0.0, 0.0, 0.0
        for k, tries in enumerate(self._quick.opportunities):
            rest = self._long.opportunities[k] - tries
            if tries <= 0 or rest < 2 * tries:
                continue
            rate = (self._long.accepted[k] - self._quick.accepted[k] + 0.5) / (rest + 1)
            expected, found = expected + rate * tries, found + self._quick.accepted[k]
            variance += max(rate * (1 - rate), 1e-3) * tries * (1 + tries / rest)
        return (found - expected) / math.sqrt(variance) if variance > 0 else 0.0
