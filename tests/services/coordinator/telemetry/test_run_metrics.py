"""Whole runs on fakes with simulated time, metrics told along; then their values against what the run recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.coordinator.coordinator import Coordinator
from services.coordinator.observer import Fanout
from services.coordinator.resume import RunMemory
from services.coordinator.telemetry.run_metrics import RunMetrics
from services.core.types import (
    BufferView,
    DrafterProgress,
    MemorySwitch,
    ProgressView,
    RunEvent,
    ServedVersions,
    ServerReport,
    SlotState,
    StrategySpan,
)
from tests.services.coordinator.world import CoordinatorKilled, World, tiny_config


class MeasuredWorld(World):
    """Coordinators tell `metrics`; one that takes over goes on from what the one before had last offered."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(tiny_config(**changes))
        self.memory = RunMemory(self.observer)
        self.take_over(None)

    def take_over(self, takeover: Any) -> None:
        earlier = None if takeover is None else takeover.values
        self.metrics = RunMetrics(
            self.config, "r1", self.clock, lambda weights, blob: 1000, earlier, takeover is not None, self.clock
        )
        self.coordinator = Coordinator(
            self.config, self.inputs, self.services, Fanout(self.memory, self.metrics),  # type: ignore[arg-type]
            self.clock, takeover, self.metrics,
        )  # fmt: skip

    def value(self, name: str, *series: str) -> float:
        state = self.metrics.read()
        return state["|".join((f"longtail_{name}", *series))][0]


def test_a_run_is_counted_as_it_was() -> None:
    world = MeasuredWorld()
    summary = world.coordinator.run()
    steps, groups = world.observer.steps, world.observer.groups
    rollouts = [r for per in groups.values() for g in per for r in g.rollouts]
    assert world.value("steps_total") == len(steps) == 3
    assert world.value("rollouts_finished_total", "stop") == len(rollouts)
    assert world.value("idle_seconds_total", "unused") == pytest.approx(sum(m.idle_s for m in steps))
    assert world.value("idle_seconds_total", "drafting") == pytest.approx(sum(m.drafting_s for m in steps))
    assert world.value("idle_seconds_total", "drafting") > 0
    assert world.value("published_version", "policy") == summary["policy_version"] == 3
    assert world.value("published_version", "drafter") == summary["drafter_version"]
    assert world.value("publish_bytes_total", "policy") == 4 * 1000
    assert world.value("reward_mean") == steps[-1].reward_mean
    assert world.value("rollout_staleness") == 0, "rollouts are strictly on-policy"
    micro_steps = sum(world.value("drafter_micro_steps_total", f"slot {i}") for i in range(2))
    assert micro_steps == sum(m.drafter_micro_steps for m in steps) > 0
    state = world.metrics.read()
    lengths = state["longtail_response_tokens"]
    assert lengths[0] == sum(len(r.response_ids) for r in rollouts) and sum(lengths[1:]) == len(rollouts)


def test_slot_seconds_are_the_spans() -> None:
    world = MeasuredWorld()
    world.coordinator.run()
    told: dict[tuple[str, str], float] = {}
    for span in world.observer.spans:
        told[span.slot, span.role] = told.get((span.slot, span.role), 0.0) + span.end_s - span.start_s
    for (slot, role), seconds in told.items():
        assert world.value("slot_seconds_total", slot, role) == pytest.approx(seconds), (slot, role)
    assert ("policy", "policy") in told and ("slot 0", "drafting") in told


def test_a_role_that_empties_is_zero_not_gone() -> None:
    world = MeasuredWorld()
    seen: dict[str, set[float]] = {}

    def watch(view: ProgressView) -> None:
        state = world.metrics.read()
        for role in SlotState:
            seen.setdefault(role.value, set()).add(state[f"longtail_slots|{role.value}"][0])
        assert sum(state[f"longtail_slots|{role.value}"][0] for role in SlotState) == 2

    world.observer.watch = watch
    world.coordinator.run()
    assert seen["rollout"] >= {0.0, 2.0} and seen["idle"] >= {0.0, 2.0} and seen["lost"] == {0.0}
    assert world.value("rollouts", "running") == world.value("rollouts", "queued") == 0


def test_totals_survive_a_coordinator_that_dies() -> None:
    """Row 76: the driver has what was offered last; the next coordinator counts on from there."""
    world = MeasuredWorld()
    before: dict[str, float] = {}

    def kill(view: ProgressView) -> None:
        state = world.metrics.read()
        world.memory.values(state)
        if view.step == 2 and view.phase == "rollout" and view.rollouts_done > 3:
            world.observer.watch = lambda view: None
            before.update({key: numbers[0] for key, numbers in state.items() if "_total" in key})
            raise CoordinatorKilled

    world.observer.watch = kill
    with pytest.raises(CoordinatorKilled):
        world.coordinator.run()
    world.take_over(world.memory.takeover(world.clock()))
    assert before["longtail_steps_total"] == 1 and before["longtail_generated_tokens_total|slot 0"] > 0
    state = world.metrics.read()
    assert all(state[key][0] >= number for key, number in before.items())
    world.coordinator.run()
    assert world.value("steps_total") == 3 and world.value("coordinator_restarts_total") == 1
    state = world.metrics.read()
    assert all(state[key][0] >= number for key, number in before.items())


def test_a_lost_server_shows() -> None:
    world = MeasuredWorld()

    def kill(view: ProgressView) -> None:
        if view.step == 2 and view.phase == "rollout" and view.rollouts_running:
            world.observer.watch = lambda view: (
                world.servers[1].restart() if world.servers[1].instance is None else None
            )
            world.servers[1].kill()

    world.observer.watch = kill
    world.coordinator.run()
    assert world.value("events_total", "slot_lost") == world.value("events_total", "slot_returned") == 1
    assert world.value("slot_seconds_total", "slot 1", "lost") > 0


# ---------------------------------------------------------------------------- single facts


def metrics(**changes: Any) -> RunMetrics:
    world = World(tiny_config(**changes))
    return RunMetrics(world.config, "r1", world.clock, lambda weights, blob: None)


def of(metrics: RunMetrics, name: str, *series: str) -> float:
    return metrics.read()["|".join((f"longtail_{name}", *series))][0]


def test_memory_switches_are_counted_with_time_and_bytes() -> None:
    m = metrics()
    switches = (MemorySwitch(True, 0.25, 4000), MemorySwitch(False, 0.5, 4000))
    m.reported(1, ServerReport((), (), 0, 5, 0.1, "off", ServedVersions(3, None), memory_switches=switches))
    m.switched(MemorySwitch(True, 0.125, 900))
    for holder in ("rollout", "policy"):
        assert of(m, "memory_switches_total", holder, "release") == 1
    assert of(m, "memory_switches_total", "rollout", "resume") == 1
    assert of(m, "memory_switches_total", "policy", "resume") == 0
    assert of(m, "memory_switch_seconds_total", "rollout", "resume") == 0.5
    assert of(m, "memory_switch_seconds_total", "policy", "release") == 0.125
    assert of(m, "memory_switch_bytes_total", "rollout", "release") == 4000
    assert of(m, "served_version", "slot 1", "policy") == 3
    assert "longtail_served_version|slot 1|drafter" not in m.read(), "nothing was loaded"


def test_rounds_are_counted_by_the_chosen_strategy() -> None:
    m = metrics()
    for strategy, rounds in (("off", 3), ("eagle_3_1_4", 5), ("off", 4), ("never_configured", 2)):
        span = StrategySpan(-1.0, 0.0, strategy, "why", rounds, 1.0, rounds, rounds, 1, 1)
        m.reported(1, ServerReport((), (), 0, 5, 0.1, "off", ServedVersions(3, None), spans=(span,)))
    assert of(m, "strategy_rounds_total", "slot 1", "off") == 7
    assert of(m, "strategy_rounds_total", "slot 1", "eagle_3_1_4") == 5
    assert of(m, "strategy_rounds_total", "slot 1", "other") == 2
    assert of(m, "strategy_rounds_total", "slot 0", "off") == 0


def test_a_gain_that_nobody_predicts_has_no_sample() -> None:
    world = World(tiny_config())
    m = RunMetrics(world.config, "r1", world.clock, lambda weights, blob: None)
    world.coordinator.run()
    step = world.observer.steps[0]
    m.step(replace(step, achieved_gain=None, predicted_gain=None))
    assert not any("gain" in key for key in m.read()), "unknown is not 1"
    m.step(replace(step, achieved_gain=1.5, predicted_gain=1.25))
    assert of(m, "achieved_gain") == 1.5 and of(m, "predicted_gain") == 1.25


def test_a_buffer_of_a_restarted_trainer_counts_from_nothing() -> None:
    m = metrics()
    for lost in (3, 5, 2):  # the third is told by another process
        m.trained(0, DrafterProgress(1, 1, 10, 1.0, (), 0.1, BufferView(4, 400, 0, {"evicted": lost})))
    assert of(m, "drafter_sequences_lost_total", "evicted") == 5 + 2
    assert of(m, "drafter_buffer_bytes", "slot 0", "memory") == 400


def test_an_event_or_phase_of_another_name_is_other() -> None:
    m = metrics()
    m.event(RunEvent(0.0, "never_heard", "x", ""))
    view = ProgressView("resting", 1, 3, 0, 0, 0, 0.0, None, None, None, 0, 0, {})
    m.progress(view)
    assert of(m, "events_total", "other") == 1 and of(m, "phase", "other") == 1 and of(m, "phase", "starting") == 0


def test_buckets_are_named_by_their_range() -> None:
    strategy = {"drafter": "eagle", "depth": 2, "topk": 1, "num_draft_tokens": 3}
    buckets = [{"min_running": 1, "strategies": [strategy]}, {"min_running": 17, "strategies": [{"drafter": "off"}]}]
    m = metrics(speculation={"selector": {"type": "beg_mab", "buckets": buckets}})
    keys = {key for key in m.read() if key.startswith("longtail_verify_steps_total|")}
    assert keys == {
        f"longtail_verify_steps_total|{s}|{b}" for s in ("off", "eagle_2_1_3", "other") for b in ("1-16", "17+")
    }


def test_a_selector_without_ranges_is_shown_by_octaves() -> None:
    chain = {"drafter": "eagle", "depth": 2, "topk": 1, "num_draft_tokens": 3}
    m = metrics(speculation={"selector": {"type": "adaptive", "strategies": [chain]}})
    keys = {tuple(key.split("|")[1:]) for key in m.read() if key.startswith("longtail_verify_steps_total|")}
    assert {strategy for strategy, _ in keys} == {"off", "eagle_2_1_3", "other"}
    assert {bucket for _, bucket in keys} == {"1-1", "2-2", "3-4", "5-8", "9-16", "17-32", "33-64", "65+"}
