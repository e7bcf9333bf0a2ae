from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from services.config.schema import ClusterConfig
from services.config.speculation import (
    AdaptiveSelector,
    AnySelector,
    Bucket,
    BucketSelector,
    DepthSlot,
    EmaSelector,
    SpeculationConfig,
    StrategyConfig,
    eagle_chain,
)
from services.speculation.adaptive import Adaptive
from services.speculation.beg import BucketedEpsilonGreedy
from services.speculation.ema import Ema
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.selector import Fixed, make_selector
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

SUFFIX = StrategyConfig(drafter="suffix", depth=3, num_draft_tokens=4)
eagle = eagle_chain


def test_fixed_is_the_configured_strategy_always() -> None:
    selector, view = make_selector(SpeculationConfig(), random.Random(0)), RoundView(7, 700)
    assert isinstance(selector, Fixed) and selector.choose(view).strategy == OFF and OFF.is_off
    selector.record(RoundOutcome(OFF, view, 3, StageSeconds(0.0, 0.0, 0.1, 0.0)))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (AdaptiveSelector(strategies=(eagle(2),)), Adaptive),
        (BucketSelector(buckets=(Bucket(strategies=(eagle(2), StrategyConfig())),)), BucketedEpsilonGreedy),
        (EmaSelector(), Ema),
    ],
)
def test_every_selector_can_be_configured(config: AnySelector, kind: type) -> None:
    speculation = SpeculationConfig(selector=config)
    selector = make_selector(speculation, random.Random(0))
    names = {draft_strategy(s).name for s in speculation.strategies}
    assert isinstance(selector, kind) and selector.choose(RoundView(3, 300)).strategy.name in names


def test_off_is_among_the_strategies_of_an_adaptive_selector_once() -> None:
    for listed in ((eagle(2),), (StrategyConfig(), eagle(2)), (eagle(2), StrategyConfig())):
        chosen = SpeculationConfig(selector=AdaptiveSelector(strategies=listed)).strategies
        assert chosen == (StrategyConfig(), eagle(2))
    with pytest.raises(ValidationError, match="listed twice"):
        AdaptiveSelector(strategies=(eagle(2), eagle(2)))


@pytest.mark.parametrize("starts", [(2,), (1, 1), (1, 5, 3)])
def test_ranges_that_leave_a_hole_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="buckets must start at min_running 1"):
        BucketSelector(buckets=tuple(Bucket(min_running=n, strategies=(eagle(2),)) for n in starts))
    with pytest.raises(ValidationError, match="slots must start at min_running 1"):
        EmaSelector(slots=tuple(DepthSlot(min_running=n, depths=(1,)) for n in starts))


# -- strategies


def test_names_and_shapes() -> None:
    tree = draft_strategy(StrategyConfig(drafter="eagle", depth=3, topk=2, num_draft_tokens=8, sampled=False))
    assert tree.name == "eagle_3_2_8_argmax" and tree.shape.num_nodes == 8 and tree.shape.depth <= 3
    assert draft_strategy(eagle(3)).name == "eagle_3_1_4" and draft_strategy(eagle(3)).shape.is_chain
    assert draft_strategy(SUFFIX).name == "suffix_3_1_4"
    assert draft_strategy(eagle(3)) == draft_strategy(eagle(3)) != draft_strategy(eagle(3, sampled=False))
    assert isinstance(OFF, DraftStrategy) and OFF.shape.num_nodes == 1


@pytest.mark.parametrize(
    "speculation",
    [
        {"acceptance": "threshold"},
        {"accept_threshold": 0.9},
        {"acceptance": "threshold", "accept_threshold": 0.5},
        {"acceptance": "exact", "accept_threshold": 0.999},
    ],
)
def test_row_18_lossy_acceptance_is_refused_unless_allowed(speculation: dict) -> None:
    with pytest.raises(ValidationError, match="allow_lossy"):
        ClusterConfig(speculation=SpeculationConfig(**speculation))
    ClusterConfig(speculation=SpeculationConfig(**speculation, allow_lossy=True))


@pytest.mark.parametrize("acceptance", ["typical", "synthetic", "greedy", ""])
def test_row_18_unknown_acceptance_is_refused_even_when_lossy_is_allowed(acceptance: str) -> None:
    with pytest.raises(ValidationError):
        SpeculationConfig(acceptance=acceptance, allow_lossy=True)  # type: ignore[arg-type]


def test_row_18_lossless_is_the_default() -> None:
    speculation = ClusterConfig().speculation
    assert speculation.acceptance == "exact" and speculation.accept_threshold == 1.0 and not speculation.allow_lossy
