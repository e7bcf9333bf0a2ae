"""Which strategy the next round uses. The score of a strategy is tokens per second, measured on its own rounds."""

from __future__ import annotations

import random
from collections import deque
from statistics import median
from typing import Protocol

from services.config.speculation import EpsilonGreedySelector, SpeculationConfig
from services.speculation.round import Choice, RoundOutcome, RoundView
from services.speculation.strategy import DraftStrategy, draft_strategy


class Selector(Protocol):
    def choose(self, view: RoundView) -> Choice:
        """The strategy for the next round."""

    def record(self, outcome: RoundOutcome) -> None:
        """Tell what a round brought, also one whose strategy the selector did not choose."""


class Fixed:
    """Always the same strategy."""

    def __init__(self, strategy: DraftStrategy) -> None:
        self._strategy = strategy

    def choose(self, view: RoundView) -> Choice:
        return Choice(self._strategy, "the only one configured")

    def record(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""


class EpsilonGreedy:
    """Per bucket of running requests: untried strategies first, then with probability epsilon a random one, else the
    best median score over a sliding window."""

    def __init__(self, config: EpsilonGreedySelector, rng: random.Random) -> None:
        self._epsilon, self._rng = config.epsilon, rng
        self._starts = [b.min_running for b in config.buckets]
        self._arms = [
            {draft_strategy(s): deque[float](maxlen=config.window) for s in b.strategies} for b in config.buckets
        ]

    def choose(self, view: RoundView) -> Choice:
        arms = self._arms[self._bucket(view.running)]
        untried = [s for s, scores in arms.items() if not scores]
        if untried:
            return Choice(untried[0], "not tried yet")
        if self._rng.random() < self._epsilon:
            return Choice(self._rng.choice(list(arms)), "explored at random")
        return Choice(max(arms, key=lambda s: median(arms[s])), "fastest so far")

    def record(self, outcome: RoundOutcome) -> None:
        scores = self._arms[self._bucket(outcome.view.running)].get(outcome.strategy)
        if scores is not None:  # None: a forced strategy that is no candidate here
            scores.append(outcome.tokens / max(outcome.seconds.total, 1e-9))

    def _bucket(self, running: int) -> int:
        return max(i for i, start in enumerate(self._starts) if start <= running)


def make_selector(config: SpeculationConfig, rng: random.Random) -> Selector:
    selector = config.selector
    if isinstance(selector, EpsilonGreedySelector):
        return EpsilonGreedy(selector, rng)
    return Fixed(draft_strategy(selector.strategy))
