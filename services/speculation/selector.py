"""Which strategy the next round uses: a selector is asked before each round and told what it brought."""

from __future__ import annotations

import random
from typing import Protocol

from services.config.speculation import AdaptiveSelector, BucketSelector, EmaSelector, SpeculationConfig
from services.speculation.adaptive import Adaptive
from services.speculation.beg import BucketedEpsilonGreedy
from services.speculation.ema import Ema
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


def make_selector(config: SpeculationConfig, rng: random.Random) -> Selector:
    match config.selector:
        case AdaptiveSelector() as adaptive:
            return Adaptive.configured(adaptive)
        case BucketSelector() as buckets:
            return BucketedEpsilonGreedy(buckets, rng)
        case EmaSelector() as ema:
            return Ema(ema)
    return Fixed(draft_strategy(config.selector.strategy))
