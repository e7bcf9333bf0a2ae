from __future__ import annotations

import random
from collections import Counter
from statistics import median

import pytest

from services.config.speculation import Bucket, BucketSelector, StrategyConfig, eagle_chain
from services.speculation.beg import BucketedEpsilonGreedy, batch_group
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

SUFFIX = StrategyConfig(drafter="suffix", depth=3, num_draft_tokens=4)
ARMS = (StrategyConfig(), eagle_chain(2), eagle_chain(4), SUFFIX)
NAMES = [draft_strategy(a).name for a in ARMS]


def make(epsilon: float = 0.1, window: int = 300, buckets: tuple[Bucket, ...] | None = None, seed: int = 0):
    buckets = buckets or (Bucket(strategies=ARMS),)
    return BucketedEpsilonGreedy(BucketSelector(epsilon=epsilon, window=window, buckets=buckets), random.Random(seed))


def outcome(strategy: DraftStrategy, running: int, accepted: int, seconds: float) -> RoundOutcome:
    """All of them in the first position, however many there are."""
    tried, found = ((accepted,), (accepted,)) if accepted else ((), ())
    view, stages = RoundView(running, 100 * running), StageSeconds(0.0, 0.0, seconds, 0.0)
    return RoundOutcome(strategy, view, running + accepted, stages, tried, found)


def play(selector: BucketedEpsilonGreedy, seconds: dict[str, float], rounds: int, running: int = 1) -> Counter[str]:
    """Nothing is accepted: the fastest round wins."""
    chosen: Counter[str] = Counter()
    for _ in range(rounds):
        s = selector.choose(RoundView(running, 100 * running)).strategy
        chosen[s.name] += 1
        selector.record(outcome(s, running, 0, seconds[s.name]))
    return chosen


@pytest.mark.parametrize("best", NAMES)
def test_finds_the_best_arm_and_tries_all_for_ever(best: str) -> None:
    chosen = play(make(), dict.fromkeys(NAMES, 1.0) | {best: 0.5}, 1000)
    assert chosen[best] > 850 and all(chosen[name] > 5 for name in NAMES)


def test_untried_arms_come_first_and_epsilon_0_never_explores_again() -> None:
    selector, seconds = make(epsilon=0.0), {name: 1.0 / (i + 1) for i, name in enumerate(NAMES)}
    assert [next(iter(play(selector, seconds, 1))) for _ in ARMS] == NAMES
    assert set(play(selector, seconds, 50)) == {NAMES[-1]}


def test_the_reward_is_the_references() -> None:
    """Median over all batch sizes of (mean accepted + 1), times requests, through seconds."""
    selector, strategy = make(), draft_strategy(eagle_chain(2))
    lengths = []
    for n, accepted in enumerate((4, 8, 0, 4, 4)):
        selector.record(outcome(strategy, 4, accepted, 0.5))
        lengths.append(accepted / 4 + 1)
        rewards = selector._rewards[strategy.name, 4]
        # the median is looked up anew now and then: it is that of some number of rounds so far
        possible = {median(lengths[: k + 1]) * 4 / 0.5 for k in range(n + 1)}
        assert len(rewards) == n + 1 and rewards[-1] in possible
    selector.record(outcome(strategy, 8, 8, 0.5))
    assert len(selector._rewards[strategy.name, 8]) == 1, "another batch size, another window"


def test_with_one_arm_the_length_is_the_rounds_own() -> None:
    selector = make(buckets=(Bucket(strategies=ARMS[1:2]),))
    strategy = draft_strategy(ARMS[1])
    for accepted in (4, 0):
        selector.record(outcome(strategy, 4, accepted, 1.0))
    assert list(selector._rewards[strategy.name, 4]) == [8.0, 4.0]
    assert selector.choose(RoundView(4, 400)).reason.startswith("the only one")


def test_groups_of_batch_sizes() -> None:
    assert [batch_group(n) for n in (1, 31, 32, 39, 40, 127, 128, 159, 160, 300)] == [
        1, 31, 32, 32, 40, 120, 128, 128, 160, 288,
    ]  # fmt: skip


def test_the_window_forgets() -> None:
    selector, seconds = make(epsilon=0.0, window=8), dict.fromkeys(NAMES, 1.0) | {"off": 0.2}
    play(selector, seconds, 40)
    chosen = play(selector, seconds | {"off": 2.0}, 40)
    assert 4 <= chosen["off"] <= 8, "left once the window's middle is slow"


def test_buckets_hold_their_own_arms() -> None:
    selector = make(epsilon=0.0, buckets=(Bucket(strategies=ARMS[1:]), Bucket(min_running=33, strategies=ARMS[:1])))
    assert selector.choose(RoundView(33, 99)).strategy == OFF
    assert not selector.choose(RoundView(32, 99)).strategy.is_off


def test_a_forced_strategy_that_is_no_candidate_is_not_recorded() -> None:
    selector = make(epsilon=0.0, buckets=(Bucket(strategies=ARMS[:1]),))
    selector.record(outcome(draft_strategy(eagle_chain(7)), 1, 0, 1e-9))
    assert selector.choose(RoundView(1, 9)).strategy == OFF
    selector.record(outcome(OFF, 1, 0, 0.0))  # a clock too coarse for the round


def test_the_same_seed_chooses_the_same() -> None:
    def sequence(seed: int) -> list[str]:
        selector = make(epsilon=0.5, seed=seed)
        return [next(iter(play(selector, dict.fromkeys(NAMES, 1.0), 1))) for _ in range(50)]

    assert sequence(3) == sequence(3) != sequence(4)
