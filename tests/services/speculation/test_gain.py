"""The predicted gain: exact where it can be calculated by hand, and a simulation with real chance agrees."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.config.speculation import StrategyConfig
from services.core.gain import ExpectedGain, Workload
from services.speculation.gain import MOST_TOKENS, GivenAcceptance, deal, predict
from services.speculation.round import RoundView, StageSeconds
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

CHAIN = draft_strategy(StrategyConfig(drafter="eagle", depth=3, num_draft_tokens=4))
LONG = draft_strategy(StrategyConfig(drafter="eagle", depth=6, num_draft_tokens=7))
TREE = draft_strategy(StrategyConfig(drafter="eagle", depth=3, topk=2, num_draft_tokens=7))
SUFFIX = draft_strategy(StrategyConfig(drafter="suffix", depth=3, num_draft_tokens=4))
ARMS = (CHAIN, LONG, TREE, SUFFIX)


@dataclass(frozen=True)
class Linear:
    """Seconds: a floor, by node, by context token, by draft pass, and by token that the drafter has not seen."""

    floor: float = 1.0
    node: float = 0.02
    context: float = 1e-4
    draft: float = 0.1
    unseen: float = 0.0

    def seconds(self, strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        network = strategy.drafter == "eagle"
        return StageSeconds(
            extend=self.unseen * view.behind_tokens if network else 0.0,
            draft=self.draft * strategy.depth if network else 0.0,
            verify=self.floor + self.node * view.running * strategy.num_draft_tokens,
            rest=self.context * view.context_tokens,
        )


GIVEN = GivenAcceptance((0.8, 0.7, 0.6))
lengths = st.lists(st.integers(1, 3000), min_size=1, max_size=40)


def work(lengths: list[int], capacity: int = 16, group: int = 1, prompt: float = 20.0) -> Workload:
    return Workload(tuple(lengths), group, prompt, capacity, 1.0)


@pytest.mark.parametrize("count", [1, 4])
def test_equal_requests_with_off_cost_what_the_rounds_cost(count: int) -> None:
    costs, length = Linear(), 600
    replay = predict(work([length] * count), [], costs, GIVEN)
    by_hand = sum(
        costs.seconds(OFF, RoundView(count, count * (20 + made))).total for made in range(length)
    )  # context of round k: k tokens made before it
    assert replay.gain.off_s == pytest.approx(by_hand, rel=2e-3) and replay.gain.ratio == 1.0
    assert sum(s.rounds for s in replay.off) == pytest.approx(length)


@given(lengths, st.integers(1, 4), st.integers(4, 20))
@settings(max_examples=60, deadline=None)
def test_every_token_is_made_once_and_capacity_is_kept(drawn: list[int], group: int, capacity: int) -> None:
    replay = predict(work(drawn, capacity, group), ARMS, Linear(), GIVEN)
    assert sum(s.tokens for s in replay.off) == pytest.approx(sum(drawn)), "OFF throws nothing away"
    most = max(GIVEN.tokens(arm, RoundView(1, 1)) for arm in ARMS)
    made = sum(s.tokens for s in replay.on)
    # another arm than the one before may have thrown away less than it: at most the largest waste for each request
    assert sum(drawn) - 1e-6 <= made <= sum(drawn) + len(drawn) * most
    assert all(1 <= s.running <= capacity and s.seconds >= 0 and s.rounds >= 0 for s in (*replay.on, *replay.off))
    assert all(s.tokens <= MOST_TOKENS * s.running + 1e-6 for s in replay.on)


@given(lengths, st.floats(0.0, 0.3), st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_a_choice_more_never_costs(drawn: list[int], node: float, draft: float) -> None:
    """Up to what responses throw away in their last round, which the choice does not look at."""
    costs = Linear(node=node, draft=draft)
    alone = predict(work(drawn), [CHAIN], costs, GIVEN).gain
    several = predict(work(drawn), ARMS, costs, GIVEN).gain
    slack = len(drawn) * 4 * (1.0 + 16 * 8 * node + 6 * draft)
    assert several.on_s <= alone.on_s + slack and alone.on_s <= alone.off_s + slack
    assert several.off_s == alone.off_s


def test_the_best_strategy_changes_with_the_batch() -> None:
    """Nodes that are free at one request are not at sixteen: the drain goes from OFF to the long chain."""
    drawn = [round(40 * 1.35**i) for i in range(16)]
    replay = predict(work(drawn), [CHAIN, LONG], Linear(node=0.3, draft=0.02), GivenAcceptance((0.9,)))
    used = [s.strategy for s in replay.on]
    order = [name for i, name in enumerate(used) if i == 0 or used[i - 1] != name]
    assert order == ["off", "eagle_3_1_4", "eagle_6_1_7"]
    assert replay.gain.ratio > 1.3


def test_catching_up_is_paid_once_and_again_after_off() -> None:
    free, dear = Linear(), Linear(unseen=0.01)
    one = work([400], prompt=1000.0)
    extra = predict(one, [CHAIN], dear, GIVEN).gain.on_s - predict(one, [CHAIN], free, GIVEN).gain.on_s
    per_round = GIVEN.tokens(CHAIN, RoundView(1, 1))
    usual = (400 + (per_round - 1) / 2) / per_round * round(per_round) * 0.01
    assert extra == pytest.approx(usual + 1000 * 0.01, rel=0.01), "the prompt once, and a round behind in each round"
    tail = work([100] * 15 + [2000], prompt=100.0)
    drained, cheap = (predict(tail, [CHAIN], Linear(node=0.3, unseen=u), GIVEN).on for u in (0.01, 0.0))
    assert drained[0].strategy == "off" and drained[-1].strategy == CHAIN.name
    at = next(i for i, s in enumerate(drained) if s.strategy == CHAIN.name)
    extra = drained[at].seconds - cheap[at].seconds - drained[at].rounds * round(per_round) * 0.01
    assert extra == pytest.approx(200 * 0.01, rel=0.05), "all of the context, behind OFF"


@pytest.mark.parametrize("arm", [CHAIN, LONG])
@pytest.mark.parametrize("scale", [20, 200])
def test_a_simulation_with_chance_agrees(arm: DraftStrategy, scale: int) -> None:
    """Continuous batching round by round, accepted counts drawn, against the replay; means over seeds."""
    rng = random.Random(11)
    drawn = [max(1, round(scale * rng.lognormvariate(0.0, 0.9))) for _ in range(48)]
    costs, one = Linear(node=0.005), work(drawn, capacity=12, group=4)
    expected = predict(one, [arm], costs, GIVEN)
    assert Counter(s.strategy for s in expected.on).keys() == {arm.name}, "the case is one without choices"
    runs = [simulated(one, arm, costs, random.Random(seed)) for seed in range(12)]
    assert expected.gain.on_s == pytest.approx(sum(runs) / len(runs), rel=0.03)
    assert expected.gain.off_s == pytest.approx(simulated(one, OFF, costs, random.Random(0)), rel=0.01)


def simulated(one: Workload, arm: DraftStrategy, costs: Linear, rng: random.Random) -> float:
    waiting = [list(one.lengths[i : i + one.group_size]) for i in range(0, len(one.lengths), one.group_size)]
    running: list[list[int]] = []  # left, made
    seconds = 0.0
    while waiting or running:
        while waiting and len(running) + len(waiting[0]) <= one.capacity:
            running += [[n, 0] for n in waiting.pop(0)]
        context = sum(made + round(one.prompt_tokens) for _, made in running)
        seconds += costs.seconds(arm, RoundView(len(running), context)).total
        for request in running:
            brought = 1 + accepted(arm, rng)
            request[0], request[1] = request[0] - brought, request[1] + brought
        running = [r for r in running if r[0] > 0]
    return seconds


def accepted(arm: DraftStrategy, rng: random.Random) -> int:
    for k in range(arm.depth):
        if rng.random() >= GIVEN.chain[min(k, len(GIVEN.chain) - 1)]:
            return k
    return arm.depth


def test_given_acceptance_is_the_sum_of_the_runs() -> None:
    view: Callable[[DraftStrategy], float] = lambda arm: GIVEN.tokens(arm, RoundView(3, 9))  # noqa: E731
    assert view(OFF) == 1.0
    assert view(CHAIN) == pytest.approx(1 + 0.8 + 0.8 * 0.7 + 0.8 * 0.7 * 0.6)
    assert view(LONG) == pytest.approx(view(CHAIN) + 0.336 * (0.6 + 0.6**2 + 0.6**3)), "deeper is like the last"
    assert view(TREE) > view(CHAIN)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 5))
def test_dealt_work_is_all_the_work(drawn: list[int], group: int, servers: int) -> None:
    parts = deal(work(drawn, 16, group), servers)
    assert sorted(n for p in parts for n in p.lengths) == sorted(drawn) and len(parts) <= servers
    sizes = [-(-len(p.lengths) // group) for p in parts]
    assert max(sizes) - min(sizes) <= 1


def test_a_sum_of_no_server_is_unknown() -> None:
    assert ExpectedGain.summed([]) is None
    both = ExpectedGain.summed([ExpectedGain(1.0, 3.0), ExpectedGain(3.0, 3.0)])
    assert both is not None and both.ratio == 1.5
