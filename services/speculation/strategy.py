"""What a draft round looks like: a value, never a parsed string."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.config.naming import strategy_name
from services.config.speculation import StrategyConfig
from services.speculation.tree import TreeShape, tree_shape


@dataclass(frozen=True)
class DraftStrategy:
    """`depth` draft passes, `topk` branches per node, `num_draft_tokens` nodes to verify including the root (hybrid: at
    most so many)."""

    name: str
    drafter: Literal["off", "eagle", "suffix", "hybrid", "ngram"]
    depth: int
    topk: int
    num_draft_tokens: int
    sampled: bool
    budget: int | None = None

    @property
    def is_off(self) -> bool:
        return self.drafter == "off"

    @property
    def searched(self) -> bool:
        """Needs a suffix index."""
        return self.drafter in ("suffix", "hybrid")

    @property
    def longest(self) -> int:
        """Most draft tokens behind one another."""
        return self.num_draft_tokens - 1 if self.drafter == "hybrid" else self.depth

    @property
    def shape(self) -> TreeShape:
        """Of what is drawn in `depth` passes."""
        return tree_shape(self.depth, self.topk, self.num_draft_tokens)


def draft_strategy(config: StrategyConfig) -> DraftStrategy:
    return DraftStrategy(
        strategy_name(config),
        config.drafter,
        config.depth,
        config.topk,
        config.num_draft_tokens,
        config.sampled,
        config.budget,
    )


OFF = draft_strategy(StrategyConfig())
