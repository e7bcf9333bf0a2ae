"""Strategies on the run's clock, written while the run goes on; and what they gained."""

from __future__ import annotations

from itertools import pairwise

import pytest

from services.coordinator.strategies import TELL_S, StrategyLog
from services.coordinator.timeline import Timeline
from services.core.types import ServedVersions, ServerReport, StrategySpan
from tests.services.coordinator.world import World


def report(*spans: StrategySpan) -> ServerReport:
    return ServerReport((), (), 0, 0, 1.0, "off", ServedVersions(0, 0), spans=spans)


def stretch(seconds: float, strategy: str = "off", off_s: float | None = None) -> StrategySpan:
    return StrategySpan(-seconds, 0.0, strategy, "why", 10, seconds, 20, 20, 2, 2, off_s, off_s)


class Log:
    def __init__(self) -> None:
        self.now, self.told = 0.0, list[StrategySpan]()
        self.timeline = Timeline(2, lambda: self.now, lambda span: None, elapsed_s=100.0)
        self.timeline.enter("step 1")
        self.log = StrategyLog(self.timeline, self.told.append)

    def reported(self, slot: int, *spans: StrategySpan) -> None:
        self.now += 1.0
        self.log.reported(slot, report(*spans))


def test_a_long_stretch_is_told_in_parts_and_nothing_twice() -> None:
    it = Log()
    for _ in range(12):
        it.reported(1, stretch(1.0))
    assert it.told and all(s.end_s - s.start_s >= TELL_S for s in it.told), "a kill costs no more than that"
    it.log.close()
    assert [s.start_s for s in it.told[1:]] == [s.end_s for s in it.told[:-1]]
    assert (it.told[0].start_s, it.told[-1].end_s) == (100.0, 112.0), "on the run's clock, which was resumed"
    assert sum(s.rounds for s in it.told) == 120 and {(s.slot, s.label) for s in it.told} == {("slot 1", "step 1")}
    it.log.close()
    assert sum(s.rounds for s in it.told) == 120


def test_the_gain_is_of_the_phase_and_of_what_was_predicted() -> None:
    it = Log()
    assert it.log.achieved_gain is None
    it.reported(0, stretch(1.0))
    assert it.log.achieved_gain is None, "a selector that predicts nothing gained an unknown factor, not 1"
    it.reported(0, stretch(1.0, "chain", off_s=3.0))
    it.reported(1, stretch(1.0, "chain", off_s=2.0))
    assert it.log.achieved_gain == pytest.approx(2.5)
    it.timeline.enter("step 2")
    assert it.log.achieved_gain is None
    it.reported(0, stretch(2.0, "chain", off_s=1.0))
    assert it.log.achieved_gain == pytest.approx(0.5), "a loss is told, too"


def test_a_run_tells_every_round_of_its_servers() -> None:
    world = World()
    world.coordinator.run()
    told = world.observer.strategies
    tokens = {f"step {m.step}": m.response_tokens for m in world.observer.steps}
    found = {label: sum(s.tokens for s in told if s.label == label) for label in tokens}
    assert found == tokens, "on the fakes every token is of a round"
    assert {s.label for s in told} > set(tokens) and {s.slot for s in told} == {"slot 0", "slot 1"}
    for slot in ("slot 0", "slot 1"):
        mine = [s for s in told if s.slot == slot]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(mine))
    assert [m.achieved_gain for m in world.observer.steps] == [pytest.approx(2.0)] * 3
