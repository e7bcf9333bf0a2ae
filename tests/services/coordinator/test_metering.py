"""Energy in whole runs on simulated time: two meters on clocks of their own, and everything they can do wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.inprocess import LocalEnergyClient, LocalHost, LocalService
from services.coordinator.calls import Calls
from services.coordinator.metering import CALL_TIMEOUT_S, DRIFT, MAX_FAILURES, SLACK_S, Alignment, Metering
from services.core.energy import EnergyReading, GpuEnergy, GpuName
from services.core.types import RunEvent, SlotSpan
from tests.services.coordinator.fakes import FakeClock
from tests.services.coordinator.world import World, tiny_config

WATTS = {"GPU-a": 300.0, "GPU-b": 100.0, "GPU-c": 300.0}
USERS = {
    "slot 0": (GpuName("energy-0", "0"),),
    "slot 1": (GpuName("energy-0", "1"),),
    "policy": (GpuName("energy-1", "0"),),
}


@dataclass
class FakeMeter:
    """Constant power, sampled five times a second on a clock that is `ahead_s` of the coordinator's."""

    clock: FakeClock
    gpus: dict[str, str]  # uuid by entry
    ahead_s: float
    started_s: float = 0.0
    slow_s: float = 0.0
    change: Callable[[EnergyReading], EnergyReading] = lambda reading: reading
    asked: int = 0

    def read(self, since_s: float | None) -> EnergyReading:
        self.asked += 1
        self.clock.now += self.slow_s
        now = self.clock() + self.ahead_s
        first = self.started_s + self.ahead_s
        grid = [first + 0.2 * i for i in range(int((now - first) / 0.2) + 1)] + [now]
        times = tuple(t for t in grid if since_s is None or t >= since_s - 0.2)
        found = tuple(
            GpuEnergy(u, "counter", times, tuple(7 + WATTS[u] * (t - first) for t in times)) for u in self.gpus.values()
        )
        return self.change(EnergyReading(now, found, self.gpus))


class Metered(World):
    """Slots 0 and 1 on one machine (300 W and 100 W), the policy trainer on another (300 W)."""

    def __init__(self) -> None:
        super().__init__(tiny_config(run={"steps": 4, "eval_prompts": 3}))
        self.meters = [
            FakeMeter(self.clock, {"0": "GPU-a", "1": "GPU-b"}, ahead_s=5000.0),
            FakeMeter(self.clock, {"0": "GPU-c"}, ahead_s=-300.0),
        ]
        self.hosts = [
            LocalService(f"energy-{i}", lambda m=m: m, self.host)  # type: ignore[misc]
            for i, m in enumerate(self.meters)
        ]
        self.coordinator.measure_energy([LocalEnergyClient(h) for h in self.hosts], USERS)

    def energy(self) -> list[dict[str, float] | None]:
        return [m.energy_j for m in self.observer.steps]

    def told(self, kind: str) -> list[RunEvent]:
        return [e for e in self.observer.events if e.kind == kind]


def seconds(world: World, slot: str, role: str, step: int) -> float:
    return sum(
        s.end_s - s.start_s for s in world.observer.spans if (s.slot, s.role, s.label) == (slot, role, f"step {step}")
    )


def test_every_step_tells_its_joules_by_role_and_the_summary_adds_them_up() -> None:
    world = Metered()
    summary = world.coordinator.run()
    for metrics in world.observer.steps:
        assert metrics.energy_j is not None
        length = metrics.energy_j["policy"] / 300.0  # the policy's GPU is its own from the step's begin to its record
        assert sum(metrics.energy_j.values()) == pytest.approx(700.0 * length)
        for role in ("rollout", "draining", "drafting"):
            wanted = sum(w * seconds(world, f"slot {i}", role, metrics.step) for i, w in enumerate((300.0, 100.0)))
            assert metrics.energy_j[role] == pytest.approx(wanted, abs=1.0), (metrics.step, role)
        assert metrics.energy_j["draining"] > 0 and metrics.energy_j["idle"] > 0 and metrics.energy_j["lost"] == 0
    assert any(m.energy_j["drafting"] > 0 for m in world.observer.steps)
    assert summary["energy_method"] == "counter" and summary["energy_steps"] == 4
    for role, joules in summary["energy_j"].items():
        assert joules == pytest.approx(sum(m.energy_j[role] for m in world.observer.steps))
    assert summary["joules_per_step"] == pytest.approx(sum(summary["energy_j"].values()) / 4)
    assert not world.told("energy_missing")


def test_evaluations_between_steps_are_in_no_step() -> None:
    world = Metered()
    world.coordinator.run()
    for before, after in zip(world.observer.steps, world.observer.steps[1:], strict=False):
        assert after.energy_j["policy"] / 300.0 <= after.at_s - before.at_s + 1e-6
    assert sum(m.energy_j["policy"] for m in world.observer.steps) / 300.0 < world.observer.steps[-1].at_s


def test_without_meters_there_are_no_figures_and_no_events() -> None:
    world = World()
    summary = world.coordinator.run()
    assert all(m.energy_j is None for m in world.observer.steps)
    assert (summary["energy_j"], summary["joules_per_step"], summary["energy_steps"]) == (None, None, 0)
    assert not [e for e in world.observer.events if e.kind.startswith("energy")]


def test_machines_without_a_driver_are_asked_once_and_nobody_is_told() -> None:
    world = Metered()
    for meter in world.meters:
        meter.change = lambda reading: EnergyReading(reading.now_s, absent=True)
    world.coordinator.run()
    assert world.energy() == [None] * 4 and [m.asked for m in world.meters] == [1, 1]
    assert not [e for e in world.observer.events if e.kind.startswith("energy")]


def test_one_machine_without_a_driver_beside_one_with_is_no_figure_for_the_whole() -> None:
    world = Metered()
    world.meters[1].change = lambda reading: EnergyReading(reading.now_s, absent=True)
    assert world.coordinator.run()["status"] == "finished"
    assert world.energy() == [None] * 4
    assert "no NVIDIA driver" in world.told("energy_missing")[0].message


def test_a_silent_meter_costs_its_time_out_a_few_times_and_the_run_goes_on() -> None:
    world = Metered()
    nowhere = LocalHost(world.clock, world.clock.sleep)  # which nobody waits at, so its services never run
    silent = LocalEnergyClient(LocalService("energy-0", lambda: world.meters[0], nowhere))
    world.coordinator.measure_energy([silent], USERS)
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and world.energy() == [None] * 4
    told = world.told("energy_missing")
    assert len(told) == MAX_FAILURES
    assert all(e.subject == "energy-0" and f"within {CALL_TIMEOUT_S:.0f} s" in e.message for e in told)
    assert "not measured any more" in told[-1].message and "not measured any more" not in told[0].message


def test_a_meter_that_dies_and_comes_back_costs_the_steps_it_does_not_cover() -> None:
    world = Metered()
    meter, host = world.meters[0], world.hosts[0]

    def watch(view: Any) -> None:
        if view.step == 2 and view.phase == "rollout" and host.starts == 1:
            host.kill()
            meter.started_s, meter.ahead_s = world.clock() + 2 * SLACK_S, -9000.0  # another process, another clock
            world.clock.now += 2 * SLACK_S
            host.restart()

    world.observer.watch = watch
    summary = world.coordinator.run()
    first, second, third, fourth = world.energy()
    assert host.starts == 2 and second is None and first and third and fourth
    assert third["policy"] * 700 / 300 == pytest.approx(sum(third.values()), rel=1e-3)
    (told,) = world.told("energy_missing")
    assert "no samples of a part of the step" in told.message
    assert summary["energy_steps"] == 3 and summary["joules_per_step"] * 3 == pytest.approx(
        sum(summary["energy_j"].values())
    )


def test_a_gpu_that_is_lost_says_so() -> None:
    world = Metered()

    def lose(reading: EnergyReading) -> EnergyReading:
        a, _ = reading.gpus
        return replace(reading, gpus=(a, GpuEnergy("GPU-b", "counter", (), (), error="GPU-b: NVML says GPU is lost")))

    world.meters[0].change = lose
    assert world.coordinator.run()["status"] == "finished"
    assert world.energy() == [None] * 4
    assert "GPU-b: NVML says GPU is lost" in world.told("energy_missing")[0].message
    assert len(world.told("energy_missing")) == MAX_FAILURES


def test_a_meter_that_could_not_start_says_why() -> None:
    world = Metered()
    world.meters[1].change = lambda reading: EnergyReading(reading.now_s, error="a MIG slice has no energy counter")
    assert world.coordinator.run()["status"] == "finished"
    told = world.told("energy_missing")
    assert told[0].subject == "energy-1" and "MIG slice" in told[0].message


def test_a_counter_that_restarted_is_told_once() -> None:
    world = Metered()
    world.meters[0].change = lambda r: replace(r, gpus=tuple(replace(g, resets=1) for g in r.gpus[:1]) + r.gpus[1:])
    world.coordinator.run()
    (told,) = world.told("energy_reset")
    assert told.subject == "energy-0" and "lower bound" in told.message


def test_an_answer_so_slow_that_the_clocks_cannot_be_aligned_is_no_figure() -> None:
    world = Metered()
    world.meters[0].slow_s = 2.5 * SLACK_S
    world.coordinator.run()
    assert world.energy() == [None] * 4
    assert "its clock is known to" in world.told("energy_missing")[0].message


def test_a_meter_that_answered_quickly_once_may_be_slow_later() -> None:
    world = Metered()
    world.coordinator.measure_energy([LocalEnergyClient(world.hosts[0])], USERS)
    world.observer.watch = lambda view: setattr(world.meters[0], "slow_s", 2.5 if view.step > 1 else 0.0)
    world.coordinator.run()
    assert all(energy is not None for energy in world.energy())


@given(st.floats(-1e6, 1e6), st.floats(0, 10), st.floats(0, 1), st.floats(0, 1e4))
def test_the_middle_of_the_round_trip_is_right_to_half_of_it(
    ahead_s: float, round_trip_s: float, share: float, asked_s: float
) -> None:
    answered_s = asked_s + round_trip_s
    looked_s = asked_s + share * round_trip_s
    found = Alignment.of(asked_s, answered_s, looked_s + ahead_s)
    assert abs(found.offset_s + ahead_s) <= found.error_s + 1e-6


def test_the_better_bound_is_kept_until_drift_has_widened_it() -> None:
    sharp, blunt = Alignment(1.0, 0.001, 0.0), Alignment(1.005, 0.01, 5.0)
    assert sharp.better(blunt) is sharp and blunt.better(replace(sharp, at_s=6.0)).offset_s == 1.0
    later = replace(blunt, at_s=0.011 / DRIFT)
    assert sharp.better(later) is later


def test_a_bound_that_contradicts_the_one_before_means_another_clock() -> None:
    before, after = Alignment(1.0, 0.001, 0.0), Alignment(-500.0, 0.2, 5.0)
    assert before.better(after) is after


def test_spans_outside_begin_and_end_are_not_kept() -> None:
    clock = FakeClock()
    events: list[tuple[str, str, str]] = []

    def tell(kind: str, subject: str, message: str) -> RunEvent:
        events.append((kind, subject, message))
        return RunEvent(0.0, kind, subject, message)

    host = LocalHost(clock, clock.sleep)
    meter = FakeMeter(clock, {"0": "GPU-a"}, 0.0)
    client = LocalEnergyClient(LocalService("energy-0", lambda: meter, host))
    metering = Metering([client], {"slot 0": USERS["slot 0"]}, Calls(host, clock), clock, tell)
    metering.span(SlotSpan("slot 0", "drafting", 0.0, 9.0))  # of a time when nothing was measured
    assert metering.end([]) is None
    metering.begin()
    clock.now = 2.0
    metering.span(SlotSpan("slot 0", "rollout", 0.0, 2.0))
    clock.now = 3.0
    joules = metering.end([SlotSpan("slot 0", "drafting", 2.0, 3.0)])
    assert joules is not None and not events
    assert {r: round(j) for r, j in joules.items() if j} == {"rollout": 600, "drafting": 300}
