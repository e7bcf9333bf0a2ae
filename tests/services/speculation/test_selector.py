from __future__ import annotations

import random
from collections import Counter

import pytest
from pydantic import ValidationError

from services.config.schema import ClusterConfig
from services.config.speculation import Bucket, EpsilonGreedySelector, SpeculationConfig, StrategyConfig
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.selector import EpsilonGreedy, Fixed, make_selector
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy


def eagle(depth: int, **more: object) -> StrategyConfig:
    return StrategyConfig(drafter="eagle", depth=depth, num_draft_tokens=depth + 1, **more)  # type: ignore[arg-type]


ARMS = (StrategyConfig(), eagle(2), eagle(4), StrategyConfig(drafter="suffix", depth=3, num_draft_tokens=4))


def make(epsilon: float = 0.1, window: int = 64, buckets: tuple[Bucket, ...] | None = None, seed: int = 0):
    buckets = buckets or (Bucket(strategies=ARMS),)
    config = EpsilonGreedySelector(epsilon=epsilon, window=window, buckets=buckets)
    return make_selector(SpeculationConfig(selector=config), random.Random(seed))


def view(running: int) -> RoundView:
    return RoundView(running, 100 * running)


def outcome(strategy: DraftStrategy, running: int, tokens: int, seconds: float) -> RoundOutcome:
    return RoundOutcome(strategy, view(running), tokens, StageSeconds(0.0, 0.0, seconds, 0.0))


def play(selector: EpsilonGreedy, speed: dict[str, float], rounds: int, running: int = 1) -> Counter[str]:
    """Each round takes one second and brings the arm's speed in tokens."""
    chosen: Counter[str] = Counter()
    for _ in range(rounds):
        s = selector.choose(view(running)).strategy
        chosen[s.name] += 1
        selector.record(outcome(s, running, round(speed[s.name] * 1000), 1000.0))
    return chosen


def test_fixed_is_the_configured_strategy_always() -> None:
    selector = make_selector(SpeculationConfig(), random.Random(0))
    assert isinstance(selector, Fixed) and selector.choose(view(7)).strategy == OFF and OFF.is_off
    selector.record(outcome(OFF, 7, 3, 0.1))


@pytest.mark.parametrize("best", [draft_strategy(a).name for a in ARMS])
def test_epsilon_greedy_finds_the_best_arm(best: str) -> None:
    speed = {draft_strategy(a).name: 1.0 for a in ARMS} | {best: 2.0}
    chosen = play(make(), speed, 1000)
    assert chosen.most_common(1)[0][0] == best and chosen[best] > 850
    assert all(chosen[name] > 5 for name in speed), "every arm is still tried"


def test_untried_arms_come_first_and_epsilon_0_never_explores_again() -> None:
    selector, speed = make(epsilon=0.0), {draft_strategy(a).name: i + 1.0 for i, a in enumerate(ARMS)}
    first = [selector_round(selector, speed) for _ in ARMS]
    assert first == [draft_strategy(a).name for a in ARMS]
    assert set(play(selector, speed, 50)) == {first[-1]}


def selector_round(selector: EpsilonGreedy, speed: dict[str, float]) -> str:
    return next(iter(play(selector, speed, 1)))


def test_the_window_forgets() -> None:
    """An arm that became slow is left once the window holds its new scores; without exploration, too."""
    selector = make(epsilon=0.0, window=8)
    speed = {draft_strategy(a).name: 1.0 for a in ARMS} | {"off": 5.0}
    assert set(play(selector, speed, 40)) >= {"off"}
    chosen = play(selector, speed | {"off": 0.5}, 40)
    assert 4 <= chosen["off"] <= 8


def test_one_lucky_round_does_not_win() -> None:
    selector = make(epsilon=0.0)
    speed = {draft_strategy(a).name: 1.0 for a in ARMS} | {"eagle_2_1_3": 2.0}
    play(selector, speed, 20)
    for tokens in (1, 1, 10**6):
        selector.record(outcome(OFF, 1, tokens, 1.0))
    assert selector.choose(view(1)).strategy.name == "eagle_2_1_3"


def test_buckets_learn_apart() -> None:
    buckets = (Bucket(strategies=ARMS[:2]), Bucket(min_running=4, strategies=ARMS[:2]))
    selector = make(epsilon=0.0, buckets=buckets)
    play(selector, {"off": 1.0, "eagle_2_1_3": 2.0}, 20, running=3)
    play(selector, {"off": 2.0, "eagle_2_1_3": 1.0}, 20, running=4)
    assert [selector.choose(view(n)).strategy.name for n in (1, 3, 4, 100)] == [
        "eagle_2_1_3",
        "eagle_2_1_3",
        "off",
        "off",
    ]


def test_a_forced_strategy_that_is_no_candidate_is_not_recorded() -> None:
    selector = make(epsilon=0.0, buckets=(Bucket(strategies=ARMS[:1]),))
    selector.record(outcome(draft_strategy(eagle(7)), 1, 10**9, 1.0))
    assert selector.choose(view(1)).strategy == OFF
    selector.record(outcome(OFF, 1, 1, 0.0))  # a clock too coarse for the round


def test_the_same_seed_chooses_the_same() -> None:
    speed = {draft_strategy(a).name: 1.0 for a in ARMS}

    def sequence(seed: int) -> list[str]:
        selector = make(epsilon=0.5, seed=seed)
        return [selector_round(selector, speed) for _ in range(50)]

    assert sequence(3) == sequence(3) != sequence(4)


@pytest.mark.parametrize("starts", [(2,), (1, 1), (1, 5, 3)])
def test_buckets_that_leave_a_hole_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="start at min_running 1"):
        EpsilonGreedySelector(buckets=tuple(Bucket(min_running=n, strategies=ARMS) for n in starts))


# -- strategies


def test_names_and_shapes() -> None:
    tree = draft_strategy(StrategyConfig(drafter="eagle", depth=3, topk=2, num_draft_tokens=8, sampled=False))
    assert tree.name == "eagle_3_2_8_argmax" and tree.shape.num_nodes == 8 and tree.shape.depth <= 3
    assert draft_strategy(eagle(3)).name == "eagle_3_1_4" and draft_strategy(eagle(3)).shape.is_chain
    assert draft_strategy(ARMS[3]).name == "suffix_3_1_4"
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
