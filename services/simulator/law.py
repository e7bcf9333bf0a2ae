"""How drafts are accepted, as a law: position by position, of whatever strategy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from services.speculation.expectation import committed, tree_rates
from services.speculation.strategy import DraftStrategy

TRUE_RANK_DECAY = 0.3  # of siblings; not what the selector's model assumes
OFFERED = 0.9  # how often the suffix index knows how to go on


@dataclass(frozen=True)
class Law:
    """Conditional acceptance by position, of sampled EAGLE chains and of suffix drafts. `version`: the drafter's."""

    eagle: tuple[float, ...]
    suffix: tuple[float, ...]
    version: int = 0


@lru_cache(maxsize=4096)
def position_rates(strategy: DraftStrategy, law: Law) -> tuple[tuple[float, float], ...]:
    """By position: how often there is a draft, and how often it is accepted then."""
    if strategy.is_off:
        return ()
    if strategy.drafter == "suffix":
        return tuple((OFFERED, r / OFFERED) for r in law.suffix[: strategy.depth])
    if strategy.topk == 1:
        return tuple((1.0, r) for r in law.eagle[: strategy.depth])
    tree = tree_rates(strategy.shape, law.eagle[: strategy.depth], TRUE_RANK_DECAY)
    return tuple((o, a / o) if o else (0.0, 0.0) for o, a in zip(tree.offered, tree.advance, strict=True))


@lru_cache(maxsize=4096)
def expected_tokens(strategy: DraftStrategy, law: Law) -> float:
    """Per request and round, bonus included."""
    return committed([o * min(0.99, r) for o, r in position_rates(strategy, law)])
