from __future__ import annotations

import itertools
import random

import pytest

from deploy.bench_selector import STRATEGIES, TABLES
from deploy.replay import BUMP, Prices, Replay, Step, read_costs
from deploy.replay_traces import LONGEST, TRACES, law, long_tailed
from services.simulator.law import Law, position_rates
from services.speculation.expectation import committed
from services.speculation.round import RoundOutcome, RoundView
from services.speculation.strategy import OFF, DraftStrategy

BY_NAME = {s.name: s for s in STRATEGIES}


@pytest.mark.parametrize("name", TABLES)
def test_recorded_tables_fit_their_points(name: str) -> None:
    recorded = read_costs(name)
    assert len(recorded.points) >= 16 and recorded.table.spread < 0.15
    for strategy, view in itertools.product(STRATEGIES, (RoundView(1, 200, 2), RoundView(64, 20_000, 150))):
        assert 1e-4 < recorded.table.seconds(strategy, view).total < 1.0


@pytest.mark.parametrize("name", ["h100-7b", "h100-270m"])
def test_more_nodes_cost_more_in_a_full_batch_than_in_an_empty_one(name: str) -> None:
    """What the measured tables say of a wide tree; at the small model by little, which is bound by launches."""
    prices = read_costs(name).table
    ratio = {
        n: prices.seconds(BY_NAME["eagle_8_4_16"], RoundView(n, 160 * n, 4 * n)).total
        / prices.seconds(OFF, RoundView(n, 160 * n)).total
        for n in (1, 64)
    }
    assert ratio[64] > (1.4 if name == "h100-7b" else 1.05) * ratio[1]


def test_prices_lie_beside_the_table_by_a_bump_at_most() -> None:
    table = read_costs("cpu-pocket").table
    ratios = set()
    for seed, strategy, running in itertools.product(range(3), STRATEGIES, (1, 8, 64)):
        view = RoundView(running, 300 * running, 2 * running)
        true, smooth = Prices(table, seed).seconds(strategy, view), table.seconds(strategy, view)
        ratios.add(round(true.verify / smooth.verify, 6))
        assert true.extend == smooth.extend
    assert len(ratios) > 40 and max(ratios) <= 1 + 1.1 * BUMP and min(ratios) >= 1 - 1.1 * BUMP


def replay(steps: list[Step], seed: int = 0) -> Replay:
    return Replay(Prices(read_costs("h100-7b").table, seed), steps, OFF, seed)


def always(strategy: DraftStrategy, world: Replay) -> list[RoundOutcome]:
    told: list[RoundOutcome] = []
    world.run(lambda view: strategy, told.append)
    return told


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_every_token_is_committed_once(strategy: DraftStrategy) -> None:
    lengths = (5, 80, 33, 1, 200, 64)
    world = replay(
        [Step(lengths, lambda ended: law(0.8, ended), refill=4), Step((7, 7), lambda ended: law(0.2, ended))]
    )
    told = always(strategy, world)
    assert sum(o.tokens for o in told) == sum(r.tokens for r in world.rounds) == sum(lengths) + 14
    assert max(o.view.running for o in told) == 4
    for o in told:
        assert len(o.tried) == len(o.accepted) == (0 if strategy.is_off else min(strategy.depth, strategy.shape.depth))
        assert o.tokens <= o.view.running + sum(o.accepted)
        assert all(a <= t for a, t in zip(o.accepted, o.tried, strict=True))


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if not s.is_off], ids=lambda s: s.name)
def test_drawn_acceptance_is_the_expected_one(strategy: DraftStrategy) -> None:
    world = replay([Step((10**6,) * 64, lambda ended: law(0.7, ended))])
    world._running = [world._begin(world._steps[0], 10**6) for _ in range(64)]
    expected, tokens = world.expected_tokens(strategy), 0
    for _ in range(300):
        tokens += world._commit(strategy)[0]
    assert tokens / (300 * 64) == pytest.approx(expected, rel=0.02)


def test_only_eagle_rounds_catch_up() -> None:
    world = replay([Step((40,) * 3, lambda ended: law(0.0, ended))])
    world._running = [world._begin(world._steps[0], 40) for _ in range(3)]
    assert world.view().behind_tokens == world.view().context_tokens == 480
    world._commit(OFF)
    assert world.view().behind_tokens == 483
    world._commit(BY_NAME["eagle_2_1_3"])
    assert world.view().behind_tokens == 3
    world._commit(BY_NAME["suffix_4_1_5"])
    assert world.view().behind_tokens >= 6


def test_a_wider_tree_is_accepted_more_often() -> None:
    flat = Law((0.6,) * 12, (0.3,) * 12)
    means = {s.name: committed([o * r for o, r in position_rates(s, flat)]) for s in STRATEGIES if s.drafter == "eagle"}
    assert means["eagle_2_1_3"] < means["eagle_3_1_4"] < means["eagle_3_2_6"] < means["eagle_8_4_16"]


def test_the_longest_is_ten_times_the_median() -> None:
    for seed in range(5):
        lengths = sorted(long_tailed(64, random.Random(seed)))
        assert len(lengths) == 64 and lengths[-1] == LONGEST >= 10 * lengths[32]


def test_traces_are_what_they_are_called() -> None:
    steps = {name: make(random.Random(0)) for name, make in TRACES.items()}
    first = {name: [s.law(0.0).eagle[0] for s in trace] for name, trace in steps.items()}
    assert len(set(first["stationary"])) == len(set(first["drain"])) == 1
    assert first["cold"] == sorted(first["cold"]) and first["cold"][0] < 0.1
    drift = first["drift"]
    assert drift[0] > drift[1] > drift[2] < drift[3], "it falls, and a new drafter brings it back"
    assert all(len(s.lengths) == 64 and s.refill is None for s in steps["drain"])
