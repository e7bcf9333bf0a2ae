from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from services.simulator.scenario import Recorded
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
