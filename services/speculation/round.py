"""What a selector sees of a round, what it answers, and what it is told behind it. Plain Python: the same selector
decides in an engine, in a replay of recorded costs and in a simulation.

    engine -- RoundView --> selector -- Choice --> engine runs the round -- RoundOutcome --> selector
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.speculation.strategy import DraftStrategy


@dataclass(frozen=True, slots=True)
class RoundView:
    """Before the round. `context_tokens`: of all requests together, prompts and responses. `behind_tokens`: those that
    an EAGLE drafter would have to catch up with, all requests together. `temperature`: mean over the requests, 0:
    greedy. `drafter_version`: the one served; -1: none is loaded, so that nothing can be drafted with it. `offered`:
    strategies that the engine is prepared for at this batch size, OFF among them; None: all that it has."""

    running: int
    context_tokens: int
    behind_tokens: int = 0
    temperature: float = 1.0
    drafter_version: int = 0
    offered: tuple[DraftStrategy, ...] | None = None

    def __post_init__(self) -> None:
        assert self.running >= 1 and 0 <= self.behind_tokens <= self.context_tokens

    def offers(self, strategy: DraftStrategy) -> bool:
        return self.offered is None or strategy in self.offered


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Wall seconds of a round. `extend`: the drafter, or the suffix index, catches up with unseen tokens; `draft`:
    proposing; `verify`: the target over all nodes, and verification; `rest`: committing, stops, bookkeeping."""

    extend: float
    draft: float
    verify: float
    rest: float

    @property
    def total(self) -> float:
        return self.extend + self.draft + self.verify + self.rest


@dataclass(frozen=True, slots=True)
class Choice:
    """`expected`, `expected_off`: tokens per second of all requests that the selector predicts for the strategy and for
    OFF, NaN when it predicts nothing. `reason`: why, in a few words, without numbers that change every round."""

    strategy: DraftStrategy
    reason: str
    expected: float = math.nan
    expected_off: float = math.nan


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """After the round. `tokens`: committed over all requests, bonus included, without the `cut` ones, accepted behind a
    stop or the end of the budget.

    `tried[k]`: requests whose first k draft tokens were accepted and that had a draft behind them; `accepted[k]`: those
    of them whose draft was accepted there too (a tree: one of the siblings), cut off by a stop or not."""

    strategy: DraftStrategy
    view: RoundView
    tokens: int
    seconds: StageSeconds
    tried: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    cut: int = 0

    def __post_init__(self) -> None:
        assert len(self.tried) == len(self.accepted) and self.cut >= 0
        assert all(0 <= a <= t for a, t in zip(self.accepted, self.tried, strict=True))
