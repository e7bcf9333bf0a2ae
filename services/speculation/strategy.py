"""What a draft round looks like: a value, never a parsed string."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.config.naming import strategy_name
from services.config.speculation import StrategyConfig
from services.speculation.tree import TreeShape, tree_shape


@dataclass(frozen=True)
class DraftStrategy:
    """`depth` draft passes, `topk` branches per node, `num_draft_tokens` nodes to verify including the root."""

    name: str
    drafter: Literal["off", "eagle", "suffix", "ngram"]
    depth: int
    topk: int
    num_draft_tokens: int
    sampled: bool

    @property
    def is_off(self) -> bool:
        return self.drafter == "off"

    @property
    def shape(self) -> TreeShape:
        return tree_shape(self.depth, self.topk, self.num_draft_tokens)


def draft_strategy(config: StrategyConfig) -> DraftStrategy:
    return DraftStrategy(
        strategy_name(config), config.drafter, config.depth, config.topk, config.num_draft_tokens, config.sampled
    )


OFF = draft_strategy(StrategyConfig())
