"""The gain that an SGLang server predicts follows from the rounds that its selector has seen."""

from __future__ import annotations

import json
from random import Random

import pytest

from services.config.speculation import AdaptiveSelector, BucketSelector, EmaSelector, StrategyConfig, eagle_chain
from services.core.gain import Workload
from services.core.selector import SelectorState
from services.rollout.sglang.learned import learned_models
from services.speculation.adaptive import Adaptive
from services.speculation.beg import BucketedEpsilonGreedy
from services.speculation.ema import Ema
from services.speculation.gain import GivenAcceptance, predict
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.selector import Selector, selector_state
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

CHAIN = draft_strategy(eagle_chain(3))
RATES = (0.8, 0.7, 0.6)
WORK = Workload((900, 30, 200, 400), 2, 100.0, 4, 1.0)


class Price:
    """A pass of 10 ms, by node 20 us, a draft's pass 1 ms; whatever the context, and without any catching up."""

    def seconds(self, strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        return StageSeconds(
            0.0, 0.0, 0.0, 0.01 + 2e-5 * view.running * strategy.num_draft_tokens + 1e-3 * strategy.depth
        )


def run(selector: Selector, strategies: tuple[DraftStrategy, ...], rounds: int = 300) -> None:
    rng = Random(0)
    for n in range(rounds):
        strategy, running = strategies[n % len(strategies)], 1 + n % 4
        view = RoundView(running, 300 * running, 0, 1.0, 1)
        selector.choose(view)
        accepted = [0] * strategy.depth
        for _ in range(running):
            for k in range(strategy.depth):
                if rng.random() >= RATES[k]:
                    break
                accepted[k] += 1
        tried = (running, *accepted[:-1]) if accepted else ()
        tokens = running + sum(accepted)
        selector.record(RoundOutcome(strategy, view, tokens, Price().seconds(strategy, view), tried, tuple(accepted)))


def told(selector: Selector) -> SelectorState | None:
    """As it comes from SGLang's process."""
    state = selector_state(selector, "here")
    return None if state is None else SelectorState("here", json.loads(json.dumps(state.learned)))


def adaptive() -> Adaptive:
    return Adaptive.configured(AdaptiveSelector(strategies=(eagle_chain(3),)))


def test_it_is_the_gain_that_the_true_costs_and_rates_predict() -> None:
    selector = adaptive()
    run(selector, (OFF, CHAIN))
    models = learned_models(told(selector))
    assert models is not None
    found = predict(WORK, (CHAIN,), models.costs, models.acceptance).gain
    true = predict(WORK, (CHAIN,), Price(), GivenAcceptance(RATES)).gain
    assert found.ratio == pytest.approx(true.ratio, rel=0.1) and true.ratio > 1.5
    assert found.on_s == pytest.approx(true.on_s, rel=0.1)


@pytest.mark.parametrize("strategies", [(), (OFF,), (CHAIN,)])
def test_before_both_have_run_nothing_is_predicted(strategies: tuple[DraftStrategy, ...]) -> None:
    selector = adaptive()
    if strategies:
        run(selector, strategies)
    assert learned_models(told(selector)) is None


def test_a_selector_without_models_predicts_nothing() -> None:
    chain = StrategyConfig(drafter="eagle", depth=3, num_draft_tokens=4)
    buckets = BucketSelector.model_validate({"buckets": [{"strategies": [StrategyConfig(), chain]}]})
    for selector in (BucketedEpsilonGreedy(buckets, Random(0)), Ema(EmaSelector())):
        assert learned_models(told(selector)) is None
    assert learned_models(None) is None


def test_nothing_is_ever_to_be_caught_up_with() -> None:
    selector = adaptive()
    run(selector, (OFF, CHAIN))
    models = learned_models(told(selector))
    assert models is not None
    behind, ahead = (models.costs.seconds(CHAIN, RoundView(4, 9000, n)).total for n in (9000, 0))
    assert behind == ahead < selector.costs.seconds(CHAIN, RoundView(4, 9000, 9000)).total
