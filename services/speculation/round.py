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
    greedy."""

    running: int
    context_tokens: int
    behind_tokens: int = 0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        assert self.running >= 1 and 0 <= self.behind_tokens <= self.context_tokens


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Wall seconds of a round. `extend`: the drafter catches up with tokens it has not seen; `draft`: proposing;
    `verify`: the target over all nodes, and verification; `rest`: committing, stops, bookkeeping."""

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
    """After the round. `tokens`: committed over all requests, bonus included, without what a stop cut off.

    `tried[k]`: requests whose first k draft tokens were accepted and that had a draft behind them; `accepted[k]`: those
    of them whose draft was accepted there too (a tree: one of the siblings), cut off by a stop or not."""

    strategy: DraftStrategy
    view: RoundView
    tokens: int
    seconds: StageSeconds
    tried: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tried) == len(self.accepted)
        assert all(0 <= a <= t for a, t in zip(self.accepted, self.tried, strict=True))
