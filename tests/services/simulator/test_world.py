from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from services.coordinator.drafting import FAN, TRIES
from services.simulator.clients import SimulatedDrafter
from services.simulator.scenario import LogNormal, Recorded, Seconds
from services.simulator.world import Simulated
from tests.services.simulator.worlds import cluster, run, scenario


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    first, again = run(cluster(), scenario()), run(cluster(), scenario())
    assert first == again
    assert run(cluster(), scenario(seed=1)).virtual_s != first.virtual_s


def test_responses_are_the_same_in_every_mode_and_on_every_number_of_slots() -> None:
    def tokens(slots: int, mode: str) -> list[int]:
        config = cluster(slots, mode, groups=4 if slots == 4 else 8)
        return [m.response_tokens for m in run(config, scenario()).steps]

    assert tokens(4, "off") == tokens(4, "full") == tokens(2, "static")


def test_speculation_is_faster_and_idle_slots_train_a_drafter_that_gets_better() -> None:
    off, full = (run(cluster(mode=mode), scenario()) for mode in ("off", "full"))
    assert full.steps[-1].rollout_s < 0.9 * off.steps[-1].rollout_s
    assert off.steps[-1].drafting_s == 0 and full.steps[-1].drafting_s > 0
    assert full.events["drafter_published"] >= 1
    lengths = [m.acceptance_length_live_offline or 0.0 for m in full.steps]
    assert lengths[-1] > lengths[0]


def test_without_training_drift_makes_the_drafter_worse() -> None:
    frozen = cluster(mode="static", steps=4)
    training = frozen.drafter.training.model_copy(update={"when": "never"})
    frozen = frozen.model_copy(update={"drafter": frozen.drafter.model_copy(update={"training": training})})
    found = run(frozen, scenario())
    lengths = [m.acceptance_length or 0.0 for m in found.steps]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]
    assert "drafter_published" not in found.events


def test_one_response_alone_takes_what_its_rounds_cost() -> None:
    """By hand: a server, one group of equal responses, OFF; the virtual seconds are the table's sum."""
    config = cluster(1, "off", steps=1, groups=1)
    known = {("step00001/0000", i): 1000 for i in range(4)}
    assumed = scenario(lengths=Recorded(known))
    found = run(config, assumed)
    table, seconds = assumed.costs, 0.0
    from services.speculation.round import RoundView
    from services.speculation.strategy import OFF

    for done in range(1000):
        seconds += table.seconds(OFF, RoundView(4, 4 * (50 + done))).total
    waits = (seconds // 1 + 2) * (2 * assumed.seconds.message + assumed.seconds.turn)
    assert seconds < found.steps[0].rollout_s < seconds + 50 / assumed.prefill_rate + waits


@pytest.mark.parametrize("sigma", [0.3, 1.2])
def test_a_longer_tail_frees_more_slot_time(sigma: float) -> None:
    found = run(cluster(mode="off", groups=2), scenario(sigma))
    share = sum(m.idle_s for m in found.steps) / sum(m.rollout_s for m in found.steps) / 4
    assert (share > 0.3) == (sigma > 1)


def test_lost_slots_come_back_and_no_rollout_is_missing() -> None:
    calm = run(cluster(), scenario())
    failing = run(cluster(), scenario(failures=200.0))
    assert failing.events["slot_lost"] >= 2 and failing.events["slot_returned"] >= 1
    assert [m.num_rollouts for m in failing.steps] == [m.num_rollouts for m in calm.steps]
    assert [m.response_tokens for m in failing.steps] == [m.response_tokens for m in calm.steps]
    assert failing.virtual_s > calm.virtual_s


def test_the_tail_is_consolidated_in_a_simulation_too() -> None:
    moving = cluster(groups=2, consolidate={"enabled": True, "min_freed_s": 0.1, "max_delay": 0.2})
    found = run(moving, scenario(1.2))
    assert found.events.get("tail_moved", 0) >= 1
    still = run(cluster(groups=2), scenario(1.2))
    assert [m.response_tokens for m in found.steps] == [m.response_tokens for m in still.steps]


def test_asking_the_selector_less_often_changes_little() -> None:
    """Every round as in an engine against stretches of fifty."""
    each, seldom = (run(cluster(), scenario(stretch=n)) for n in (1, 50))
    for one, other in zip(each.steps, seldom.steps, strict=True):
        assert one.rollout_s == pytest.approx(other.rollout_s, rel=0.1)


def test_many_servers_report_no_more_often_than_the_coordinator_can_bear() -> None:
    """And nothing but how often they are asked changes."""
    often, seldom = (
        run(cluster(12, "off", steps=2, coordinator={"reports_per_s": rate}), scenario()) for rate in (400.0, 4.0)
    )
    assert seldom.answers < 0.85 * often.answers
    assert [m.response_tokens for m in seldom.steps] == [m.response_tokens for m in often.steps]
    assert seldom.virtual_s < 1.1 * often.virtual_s


def bytecodes_of_the_coordinator(slots: int, mode: str) -> int:
    """How many operations its code runs, services and their models apart."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if event == "call":
            if "services/coordinator" not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            count += 1
        return trace

    sys.settrace(trace)
    try:
        run(cluster(slots, mode, steps=1, groups=2), scenario(0.5))
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("mode", ["off", "full"])
def test_the_coordinators_work_grows_with_the_slots_and_not_with_their_square(mode: str) -> None:
    """Four times the slots have four times the messages; each may cost a little more, not four times as much."""
    few, many = (bytecodes_of_the_coordinator(slots, mode) for slots in (16, 64))
    assert many < 6 * few, f"{few} operations for 16 slots, {many} for 64"


def merging(monkeypatch: pytest.MonkeyPatch, slots: int, merge_s: float) -> tuple[Simulated, list[tuple[float, int]]]:
    """A run in which combining takes so long for each state; (when, how many states) of every request for it."""
    asked: list[tuple[float, int]] = []
    merge = SimulatedDrafter.merge

    def noted(trainer: SimulatedDrafter, states: Any, micro_steps: Any) -> Any:
        asked.append((trainer._agenda.now, len(states)))
        return merge(trainer, states, micro_steps)

    monkeypatch.setattr(SimulatedDrafter, "merge", noted)
    seconds, longest = Seconds(micro_step=0.2, restart=3.0, merge=merge_s), 20_000
    engine = {"type": "native", "max_running": 8, "max_len": 2 * longest}
    config = cluster(slots, "full", steps=2, engine=engine, sampling={"max_tokens": longest})
    return run(config, scenario(seconds=seconds, lengths=LogNormal(200, 2.0, longest))), asked


def test_a_round_of_many_slots_is_combined_a_few_parts_at_a_time_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = merging(monkeypatch, 40, 1.0)
    assert {"slot_lost", "drafter_lost", "drafter_parts_lost"}.isdisjoint(found.events)
    assert max(count for _, count in asked) == FAN and min(count for _, count in asked) > 1
    times = [when for when, _ in asked]
    assert len(set(times)) < len(times), "none at the same time as another"


@pytest.mark.parametrize("slots", [12, 24])
def test_slots_that_wait_for_a_round_keep_their_leases(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """Combining eight states takes longer than a lease, but not than a call may."""
    config, merge_s = cluster().coordinator, 12.0
    found, asked = merging(monkeypatch, slots, merge_s)
    assert config.lease_s < merge_s * max(count for _, count in asked) < config.call_timeout_s
    assert {"slot_lost", "drafter_lost", "drafter_parts_lost"}.isdisjoint(found.events)


def test_a_round_that_nobody_combines_in_time_costs_its_parts_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be handed from one trainer to the next for ever."""
    found, asked = merging(monkeypatch, 8, 100.0)
    assert found.events["drafter_parts_lost"] >= 1 and len(found.steps) == 2
    assert len(asked) == TRIES * found.events["drafter_parts_lost"]
    assert "slot_lost" not in found.events
