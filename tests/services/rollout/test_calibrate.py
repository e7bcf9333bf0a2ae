"""An engine that times itself, on a tiny model."""

from __future__ import annotations

import itertools

import pytest

from services.core.types import SamplingParams
from services.rollout.calibrate import DUMMY, Calibration, Limits, measure_costs
from services.rollout.native import NativeEngine
from services.speculation.adaptive import Adaptive
from services.speculation.cost import CostModel
from services.speculation.cost_table import CostTable
from services.speculation.expectation import AcceptanceModel
from services.speculation.round import RoundView, StageSeconds
from services.speculation.suffix_index import SuffixIndex
from tests.services.models.tiny import random_drafter, spec_of, tiny_model
from tests.services.rollout.engines import CHAINS, OFF, SUFFIX, TREES, Switching, check_all, finish, group, make_engine

ARMS = (OFF, CHAINS[0], CHAINS[2], TREES[1], SUFFIX[0])
MODEL = tiny_model("llama", 24, 0, 2.0)
LIMITS = Limits(4, 48, 24, 1.0)
VIEW = RoundView(4, 100)


class Steps:
    """A clock that every look moves by a millisecond, so that a round costs what its looks do."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


def engine_with(index: SuffixIndex | None = None, selector=OFF, drafter: bool = True) -> NativeEngine:
    return make_engine(
        MODEL, selector, random_drafter(spec_of(MODEL)) if drafter else None, rows=4, max_len=48, index=index
    )


def test_every_strategy_is_measured_at_both_ends_of_the_batch_sizes() -> None:
    points = measure_costs(engine_with(), ARMS, LIMITS, Steps(), 0.15)
    seen = {(p.strategy.name, p.view.running) for p in points}
    assert seen >= set(itertools.product((s.name for s in ARMS), (1, 4)))
    assert {p.view.running for p in points} <= {1, 2, 3, 4}
    contexts = [p.view.context_tokens / p.view.running for p in points]
    assert min(contexts) < 30 < max(contexts) + 10
    assert any(p.view.behind_tokens >= 8 * p.view.running for p in points if p.strategy.drafter == "eagle")
    for p in points:
        assert isinstance(p.seconds, StageSeconds) and p.total > 0
        assert (p.seconds.extend > 0) == (p.strategy.drafter == "eagle")
    assert CostTable.fit(points).spread < 0.5


@pytest.mark.parametrize("budget", [0.005, 0.02, 0.1])
def test_it_keeps_to_its_budget(budget: float) -> None:
    clock = Steps()
    measure_costs(engine_with(), ARMS, LIMITS, clock, budget)
    assert clock.now <= budget + 0.005, "it may end in the middle of a round, no later"


@pytest.mark.parametrize("budget", [1e-9, 1e-4])
def test_an_engine_too_slow_for_its_budget_still_gives_something_to_go_by(budget: float) -> None:
    adaptive = Adaptive(ARMS, CostModel(), AcceptanceModel())
    Calibration(adaptive, ARMS, LIMITS, Steps(), budget).run_when_ready(engine_with(), None)
    assert adaptive.measured and adaptive.costs.table != CostTable.typical()


def test_it_leaves_no_trace() -> None:
    """Neither requests nor indexed tokens nor a selector that heard of it; what comes next is plain decoding."""
    index, selector = SuffixIndex(1000, max_match=4), Switching(ARMS)
    engine = engine_with(index, selector)
    adaptive = Adaptive(ARMS, CostModel(), AcceptanceModel())
    calibration = Calibration(adaptive, ARMS, LIMITS, Steps(), 0.06)
    calibration.run_when_ready(engine, index)
    assert calibration.done and index.num_tokens == 0 and not index.propose(DUMMY, [1, 2, 3], 2)
    assert not selector.recorded and engine.num_running == engine.num_waiting == 0
    assert adaptive.acceptance.tokens(CHAINS[0], VIEW) == AcceptanceModel().tokens(CHAINS[0], VIEW)
    assert adaptive.costs.table != CostTable.typical()
    found = finish(engine, [group((1, 2, 3), 2, SamplingParams(temperature=0.0, max_tokens=16))])
    check_all(MODEL, found)
    assert selector.recorded


def test_it_waits_for_all_weights_and_for_an_idle_engine_and_runs_once() -> None:
    adaptive = Adaptive(ARMS, CostModel(), AcceptanceModel())
    calibration = Calibration(adaptive, ARMS, LIMITS, Steps(), 0.06)
    engine = engine_with(drafter=False)
    calibration.run_when_ready(engine, None)
    assert not calibration.done, "no drafter yet"
    engine.load_drafter(0, random_drafter(spec_of(MODEL)))
    engine.submit([group((1, 2, 3), 1)])
    engine.step()
    calibration.run_when_ready(engine, None)
    assert not calibration.done and engine.num_running == 1, "somebody's request runs"
    finish(engine)
    calibration.run_when_ready(engine, None)
    table = adaptive.costs.table
    assert calibration.done
    calibration.run_when_ready(engine, None)
    assert adaptive.costs.table is table


def test_a_budget_of_nothing_skips_it() -> None:
    adaptive = Adaptive(ARMS, CostModel(), AcceptanceModel())
    Calibration(adaptive, ARMS, LIMITS, Steps(), 0.0).run_when_ready(engine_with(), None)
    assert adaptive.costs.table == CostTable.typical()
