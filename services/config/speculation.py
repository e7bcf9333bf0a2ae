"""The configuration section `speculation`: strategies and the selector that chooses among them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, model_validator

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


class BucketSelector(Section):
    """The reference's bucketed epsilon-greedy (TLT, BEG-MAB) with its constants."""

    type: Literal["beg_mab"] = "beg_mab"
    epsilon: float = Field(0.1, ge=0, le=1)
    window: int = Field(300, ge=1)
    buckets: tuple[Bucket, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ordered(self) -> BucketSelector:
        _check_starts("buckets", [b.min_running for b in self.buckets])
        return self


class DepthSlot(Section):
    """Candidate depths of a chain, 0 being off, while at least `min_running` requests run."""

    min_running: int = Field(1, ge=1)
    depths: tuple[NonNegativeInt, ...] = Field(min_length=1)
    up_hysteresis: float = 0.0
    down_hysteresis: float = 0.0


_EMA_SLOTS = (
    DepthSlot(min_running=1, depths=(1, 3, 7), down_hysteresis=-0.25),
    DepthSlot(min_running=8, depths=(0, 1, 3)),
    DepthSlot(min_running=32, depths=(0, 1)),
    DepthSlot(min_running=64, depths=(0,)),
)


class EmaSelector(Section):
    """SGLang's adaptive rule with its defaults: a moving mean of accepted drafts moves the depth of an EAGLE chain."""

    type: Literal["ema"] = "ema"
    slots: tuple[DepthSlot, ...] = Field(_EMA_SLOTS, min_length=1)
    alpha: float = Field(0.2, gt=0, le=1)
    update_interval: int = Field(5, ge=1)
    warmup_rounds: int = Field(10, ge=0)
    sampled_drafts: bool = True

    @model_validator(mode="after")
    def _ordered(self) -> EmaSelector:
        _check_starts("slots", [s.min_running for s in self.slots])
        return self

    @property
    def strategies(self) -> tuple[StrategyConfig, ...]:
        depths = sorted({d for s in self.slots for d in s.depths})
        return tuple(StrategyConfig() if d == 0 else eagle_chain(d, self.sampled_drafts) for d in depths)


def eagle_chain(depth: int, sampled: bool = True) -> StrategyConfig:
    return StrategyConfig(drafter="eagle", depth=depth, num_draft_tokens=depth + 1, sampled=sampled)


class AdaptiveSelector(Section):
    """Expected tokens through expected seconds, measured; OFF is always among the strategies."""

    type: Literal["adaptive"] = "adaptive"
    strategies: tuple[StrategyConfig, ...] = Field(min_length=1)
    check_share: float = Field(0.01, ge=0, le=0.5)  # of the time, for rounds that check what might be better
    margin: float = Field(0.015, ge=0, le=1)  # by how much another strategy must be better to be switched to
    calibrate_s: float = Field(
        2.0, ge=0
    )  # at a server's start, to time its own stages; 0: rounds alone teach the costs

    @model_validator(mode="after")
    def _distinct(self) -> AdaptiveSelector:
        if len(set(self.strategies)) != len(self.strategies):
            raise ValueError("a strategy is listed twice: leave one of them out")
        return self


def _check_starts(what: str, starts: list[int]) -> None:
    if starts != sorted(set(starts)) or starts[0] != 1:
        raise ValueError(f"{what} must start at min_running 1 and grow strictly")


AnySelector = Annotated[FixedSelector | AdaptiveSelector | BucketSelector | EmaSelector, Field(discriminator="type")]


class SpeculationConfig(Section):
    selector: AnySelector = FixedSelector()
    acceptance: Literal["exact", "threshold"] = "exact"
    accept_threshold: float = Field(1.0, gt=0, le=1)
    allow_lossy: bool = False
    suffix_max_tokens: int = Field(200_000, ge=1000)

    @property
    def strategies(self) -> tuple[StrategyConfig, ...]:
        """What the selector may choose."""
        match self.selector:
            case FixedSelector(strategy=strategy):
                return (strategy,)
            case AdaptiveSelector(strategies=strategies):
                return tuple(dict.fromkeys((StrategyConfig(), *strategies)))
            case EmaSelector():
                return self.selector.strategies
        return tuple(s for b in self.selector.buckets for s in b.strategies)

    @property
    def learned(self) -> bool:
        """Some strategy needs the weights of a trained drafter."""
        return any(s.learned for s in self.strategies)
