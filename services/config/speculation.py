"""The configuration section `speculation`: strategies and the selector that chooses among them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.config.section import Section


class StrategyConfig(Section):
    """`num_draft_tokens` counts the root, as in SGLang: topk 1 means depth + 1. A hybrid chain has `depth` tokens of
    the EAGLE drafter, and room for num_draft_tokens - 1 where the suffix index knows more."""

    drafter: Literal["off", "eagle", "suffix", "hybrid", "ngram"] = "off"
    depth: int = Field(0, ge=0)
    topk: int = Field(1, ge=1)
    num_draft_tokens: int = Field(1, ge=1)
    budget: int | None = Field(None, ge=1)  # of a chain: drawn tokens per request, shared out by expected acceptance
    sampled: bool = True  # draft tokens drawn from the drafter; False: its argmax (top-k) tokens

    @model_validator(mode="after")
    def _shape(self) -> StrategyConfig:
        if self.drafter == "off":
            if self.depth or self.num_draft_tokens != 1:
                raise ValueError("strategy 'off' drafts nothing: leave depth and num_draft_tokens out")
        elif self.depth < 1:
            raise ValueError(f"strategy '{self.drafter}' needs depth >= 1")
        elif self.drafter == "hybrid" and (self.topk != 1 or self.num_draft_tokens <= self.depth):
            raise ValueError(
                "the hybrid drafter proposes chains of at least its depth: set topk to 1 and num_draft_tokens to "
                f"{self.depth + 1} or more"
            )
        elif self.drafter != "hybrid" and self.topk == 1 and self.num_draft_tokens != self.depth + 1:
            raise ValueError(f"a chain (topk 1) verifies depth + 1 tokens: set num_draft_tokens to {self.depth + 1}")
        elif self.drafter == "suffix" and self.topk != 1:
            raise ValueError("the suffix drafter proposes chains: set topk to 1")
        elif self.topk > 1 and self.num_draft_tokens < self.topk + 1:
            need = self.topk + 1
            raise ValueError(f"num_draft_tokens must hold the root and its {self.topk} children: at least {need}")
        if self.budget is not None and not (self.learned and self.topk == 1 and self.budget <= self.depth):
            raise ValueError("budget shares out the tokens of EAGLE chains: leave it out, or set at most the depth")
        return self

    @property
    def learned(self) -> bool:
        """Needs the weights of a trained drafter."""
        return self.drafter in ("eagle", "hybrid")

    @property
    def searched(self) -> bool:
        """Needs a suffix index."""
        return self.drafter in ("suffix", "hybrid")


class FixedSelector(Section):
    type: Literal["fixed"] = "fixed"
    strategy: StrategyConfig = StrategyConfig()


class Bucket(Section):
    """Candidate strategies while at least `min_running` requests run (and fewer than the next bucket's)."""

    min_running: int = Field(1, ge=1)
    strategies: tuple[StrategyConfig, ...] = Field(min_length=1)


class EpsilonGreedySelector(Section):
    type: Literal["epsilon_greedy"] = "epsilon_greedy"
    epsilon: float = Field(0.1, ge=0, le=1)
    window: int = Field(64, ge=1)
    buckets: tuple[Bucket, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ordered(self) -> EpsilonGreedySelector:
        starts = [b.min_running for b in self.buckets]
        if starts != sorted(set(starts)) or starts[0] != 1:
            raise ValueError("buckets must start at min_running 1 and grow strictly")
        return self


class SpeculationConfig(Section):
    selector: Annotated[FixedSelector | EpsilonGreedySelector, Field(discriminator="type")] = FixedSelector()
    acceptance: Literal["exact", "threshold"] = "exact"
    accept_threshold: float = Field(1.0, gt=0, le=1)
    allow_lossy: bool = False
    suffix_max_tokens: int = Field(200_000, ge=1000)

    @property
    def strategies(self) -> tuple[StrategyConfig, ...]:
        if isinstance(self.selector, FixedSelector):
            return (self.selector.strategy,)
        return tuple(s for b in self.selector.buckets for s in b.strategies)
