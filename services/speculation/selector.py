"""Which strategy the next round uses: a selector is asked before each round and told what it brought."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from services.config.speculation import AdaptiveSelector, BucketSelector, EmaSelector, SpeculationConfig
from services.core.selector import SelectorState
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


@runtime_checkable
class Learns(Protocol):
    """A selector that knows something after a while. Its state is plain values, JSON among them; `kind` says whose."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


def selector_state(selector: Selector, place: str) -> SelectorState | None:
    """What it has learned, and `place`: on which engine and device; None of one that learns nothing."""
    return SelectorState(place, selector.state()) if isinstance(selector, Learns) else None


def restore_selector(selector: Selector, state: SelectorState, place: str) -> bool:
    """Let `selector` go on from there. False, and nothing is changed, when the state is of another kind of selector, or
    of another place, whose times are not these."""
    if not isinstance(selector, Learns) or state.place != place or state.learned["kind"] != selector.state()["kind"]:
        return False
    selector.restore(state.learned)
    return True


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
