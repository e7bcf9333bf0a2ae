"""Names of strategies, for people, metrics and `set_strategy`: one spelling everywhere."""

from __future__ import annotations

from services.config.speculation import StrategyConfig


def strategy_name(strategy: StrategyConfig) -> str:
    """ "off", or `<drafter>_<depth>_<topk>_<num_draft_tokens>`, then "_budget<n>" if it has one, and "_argmax" when a
    learned draft is not sampled."""
    if strategy.drafter == "off":
        return "off"
    name = f"{strategy.drafter}_{strategy.depth}_{strategy.topk}_{strategy.num_draft_tokens}"
    name = name if strategy.budget is None else f"{name}_budget{strategy.budget}"
    return name if strategy.sampled or not strategy.learned else f"{name}_argmax"
