"""Which strategy the next round uses. The score of a strategy is tokens per second, measured on its own rounds."""

from __future__ import annotations

import random
from collections import deque
from statistics import median
from typing import Protocol

from services.config.speculation import EpsilonGreedySelector, SpeculationConfig
from services.speculation.strategy import DraftStrategy, draft_strategy


class Selector(Protocol):
    def choose(self, running: int) -> DraftStrategy:
        """The strategy for a round with `running` requests (>= 1)."""

    def record(self, strategy: DraftStrategy, running: int, tokens: int, seconds: float) -> None:
        """Tell what a round brought: tokens committed over all requests, wall seconds."""


class Fixed:
    """Always the same strategy."""

    def __init__(self, strategy: DraftStrategy) -> None:
        self._strategy = strategy

    def choose(self, running: int) -> DraftStrategy:
        return self._strategy

    def record(self, strategy: DraftStrategy, running: int, tokens: int, seconds: float) -> None:
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

    def choose(self, running: int) -> DraftStrategy:
        arms = self._arms[self._bucket(running)]
        untried = [s for s, scores in arms.items() if not scores]
        if untried:
            return untried[0]
        if self._rng.random() < self._epsilon:
            return self._rng.choice(list(arms))
        return max(arms, key=lambda s: median(arms[s]))

    def record(self, strategy: DraftStrategy, running: int, tokens: int, seconds: float) -> None:
        scores = self._arms[self._bucket(running)].get(strategy)
        if scores is not None:  # None: a forced strategy that is no candidate here
            scores.append(tokens / max(seconds, 1e-9))

    def _bucket(self, running: int) -> int:
        return max(i for i, start in enumerate(self._starts) if start <= running)


def make_selector(config: SpeculationConfig, rng: random.Random) -> Selector:
    selector = config.selector
    if isinstance(selector, EpsilonGreedySelector):
        return EpsilonGreedy(selector, rng)
    return Fixed(draft_strategy(selector.strategy))
