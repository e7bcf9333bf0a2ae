"""Rounds as an engine would tell them, from laws that a test knows."""

from __future__ import annotations

import random
from collections.abc import Sequence

from services.config.speculation import StrategyConfig, eagle_chain
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

__all__ = ["OFF", "SUFFIX", "TREE", "WIDE", "chain", "counts", "outcome"]

TREE = draft_strategy(StrategyConfig(drafter="eagle", depth=3, topk=2, num_draft_tokens=6))
WIDE = draft_strategy(StrategyConfig(drafter="eagle", depth=8, topk=4, num_draft_tokens=16))
SUFFIX = draft_strategy(StrategyConfig(drafter="suffix", depth=4, num_draft_tokens=5))


def chain(depth: int, sampled: bool = True) -> DraftStrategy:
    return draft_strategy(eagle_chain(depth, sampled))


def counts(rates: Sequence[float], running: int, rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tried, accepted) when every request has a draft at each position."""
    tried, accepted, left = [], [], running
    for rate in rates:
        tried.append(left)
        left = sum(rng.random() < rate for _ in range(left))
        accepted.append(left)
    return tuple(tried), tuple(accepted)


def outcome(
    strategy: DraftStrategy, view: RoundView, rates: Sequence[float], seconds: StageSeconds | float, rng: random.Random
) -> RoundOutcome:
    tried, accepted = counts(rates[: strategy.depth], view.running, rng)
    stages = StageSeconds(0.0, 0.0, seconds, 0.0) if isinstance(seconds, float) else seconds
    return RoundOutcome(strategy, view, view.running + sum(accepted), stages, tried, accepted)
