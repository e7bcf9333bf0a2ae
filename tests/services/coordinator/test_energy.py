"""Sharing out joules: conservation for any spans, and the rule by examples."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.energy import ROLES, EnergyCurve, energy_by_role
from services.core.types import SlotSpan

HOLDERS = ("slot 0", "slot 1", "slot 2", "policy", "reward")
GPUS = ("GPU-a", "GPU-b")
moments = st.floats(0.0, 100.0, allow_nan=False)


@st.composite
def curves(draw: st.DrawFn) -> EnergyCurve:
    times = sorted(draw(st.sets(moments, min_size=1, max_size=20)))
    steps = draw(st.lists(st.floats(0.0, 1e4), min_size=len(times), max_size=len(times)))
    return EnergyCurve(times, list(itertools.accumulate(steps)))


@st.composite
def spans(draw: st.DrawFn) -> SlotSpan:
    start, end = sorted([draw(moments), draw(moments)])
    slot = draw(st.sampled_from(HOLDERS))
    role = slot if slot in ("policy", "reward") else draw(st.sampled_from(ROLES))
    return SlotSpan(slot, role, start, end)


holders = st.fixed_dictionaries({}, optional={h: st.sets(st.sampled_from(GPUS)) for h in HOLDERS[:4]})


@given(
    st.fixed_dictionaries({gpu: curves() for gpu in GPUS}),
    st.lists(spans(), max_size=12),
    holders,
    st.tuples(moments, moments),
)
def test_the_roles_sum_to_the_counters_difference(
    measured: dict[str, EnergyCurve], held: list[SlotSpan], users: dict[str, set[str]], window: tuple[float, float]
) -> None:
    start, end = sorted(window)
    joules = energy_by_role(measured, held, users, start, end)
    assert tuple(joules) == ROLES
    assert all(j >= -1e-6 for j in joules.values())
    whole = sum(c.at(end) - c.at(start) for c in measured.values())
    assert sum(joules.values()) == pytest.approx(whole, rel=1e-9, abs=1e-6)


@given(st.lists(spans(), max_size=8), holders, curves(), moments)
def test_two_halves_of_a_window_sum_to_the_whole(
    held: list[SlotSpan], users: dict[str, set[str]], curve: EnergyCurve, middle: float
) -> None:
    parts = [energy_by_role({"GPU-a": curve}, held, users, a, b) for a, b in ((0.0, middle), (middle, 100.0))]
    whole = energy_by_role({"GPU-a": curve}, held, users, 0.0, 100.0)
    for role in ROLES:
        assert parts[0][role] + parts[1][role] == pytest.approx(whole[role], abs=1e-5)


STEADY = EnergyCurve([0.0, 10.0], [0.0, 1000.0])  # 100 W
ALONE = {"slot 0": {"GPU-a"}}
SHARED = {"slot 0": {"GPU-a"}, "slot 1": {"GPU-a"}, "policy": {"GPU-a"}}


def spent(held: list[SlotSpan], users: dict[str, set[str]], curve: EnergyCurve = STEADY) -> dict[str, float]:
    joules = energy_by_role({"GPU-a": curve}, held, users, 0.0, 10.0)
    return {role: pytest.approx(j) for role, j in joules.items() if j}


def test_a_slot_alone_has_its_gpus_joules_by_what_it_did() -> None:
    held = [
        SlotSpan("slot 0", "idle", 0, 1),
        SlotSpan("slot 0", "rollout", 1, 5),
        SlotSpan("slot 0", "draining", 5, 6),
        SlotSpan("slot 0", "drafting", 6, 7.5),
        SlotSpan("slot 0", "lost", 7.5, 8),  # and then no span: idle
    ]
    assert spent(held, ALONE) == {"idle": 300, "rollout": 400, "draining": 100, "drafting": 150, "lost": 50}


def test_the_counters_course_between_the_spans_edges_counts_not_their_length() -> None:
    curve = EnergyCurve([0.0, 4.0, 6.0, 10.0], [0.0, 40.0, 1040.0, 1080.0])
    held = [SlotSpan("slot 0", "rollout", 0, 5), SlotSpan("slot 0", "drafting", 5, 10)]
    assert spent(held, ALONE, curve) == {"rollout": 540, "drafting": 540}
    assert spent([SlotSpan("slot 0", "rollout", 0, 4)], ALONE, curve) == {"rollout": 40, "idle": 1040}


def test_slots_on_one_gpu_share_while_both_work() -> None:
    held = [SlotSpan("slot 0", "rollout", 0, 8), SlotSpan("slot 1", "drafting", 4, 10)]
    assert spent(held, SHARED) == {"rollout": 600, "drafting": 400}
    # Two that roll out beside one that drafts have two thirds.
    three = [SlotSpan(f"slot {i}", "rollout", 0, 3) for i in (0, 1)] + [SlotSpan("slot 2", "drafting", 0, 3)]
    assert spent(three, {**SHARED, "slot 2": {"GPU-a"}}) == {"rollout": 200, "drafting": 100, "idle": 700}


def test_idle_and_lost_slots_take_nothing_from_one_that_works() -> None:
    held = [SlotSpan("slot 0", "rollout", 0, 4), SlotSpan("slot 1", "idle", 0, 10), SlotSpan("slot 0", "lost", 4, 6)]
    assert spent(held, SHARED) == {"rollout": 400, "lost": 200, "idle": 400}


def test_the_policy_trainers_own_gpu_is_its_own_all_the_time_and_a_shared_one_in_its_spans() -> None:
    held = [SlotSpan("policy", "policy", 2, 4), SlotSpan("slot 0", "rollout", 0, 2)]
    assert spent(held, {"slot 0": {"GPU-b"}, "policy": {"GPU-a"}}) == {"policy": 1000}
    assert spent(held, SHARED) == {"rollout": 200, "policy": 200, "idle": 600}


def test_spans_of_holders_without_this_gpu_do_not_count() -> None:
    held = [SlotSpan("reward", "reward", 0, 10), SlotSpan("slot 1", "rollout", 0, 10)]
    assert spent(held, {"slot 0": {"GPU-a"}, "slot 1": {"GPU-b"}}) == {"idle": 1000}


def test_coverage_allows_the_slack_and_no_more() -> None:
    curve = EnergyCurve([1.0, 5.0], [0.0, 1.0])
    assert curve.covers(1.0, 5.0, 0.0) and curve.covers(0.0, 6.0, 1.0)
    assert not curve.covers(0.0, 5.0, 0.5) and not curve.covers(1.0, 6.0, 0.5)
    assert not EnergyCurve([], []).covers(0.0, 0.0, 1.0)
