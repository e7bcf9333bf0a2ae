from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from services.coordinator import scheduler
from services.coordinator.scheduler import BUSY, Pace, Slots, SlotView
from services.coordinator.work import make_work, prompts_of_step, rollout_seed
from services.core.types import SlotState
from tests.services.coordinator.fakes import SAMPLING, make_prompts

S = SlotState
T = TypeVar("T")


def over_views(decision: Callable[..., T]) -> Callable[..., T]:
    """A decision over a plain list of views."""
    return lambda pending, views, *rest: decision(pending, Slots(views), *rest)


hand_out = over_views(scheduler.hand_out)
slots_to_draft = over_views(scheduler.slots_to_draft)
slots_to_preempt = over_views(scheduler.slots_to_preempt)
slots_to_release = over_views(scheduler.slots_to_release)
slots_to_drain = over_views(scheduler.slots_to_drain)
slots_to_wake = over_views(scheduler.slots_to_wake)


def view(slot: int, state: SlotState, outstanding: int = 0, serves: bool = True, can_draft: bool = True) -> SlotView:
    return SlotView(slot, state, outstanding, serves, can_draft)


def works(count: int, size: int = 4):  # type: ignore[no-untyped-def]
    return make_work(make_prompts(count), "s", size, SAMPLING, 0)


@given(st.integers(0, 30), st.integers(1, 5), st.integers(2, 8), st.integers(8, 40))
def test_work_fits_is_in_order_and_shared_evenly(groups: int, servers: int, size: int, capacity: int) -> None:
    pending = works(groups, size)
    given_out = hand_out(pending, [view(i, S.ROLLOUT) for i in range(servers)], capacity)
    assert [g.work for g in given_out] == pending[: len(given_out)]
    load = [sum(len(g.work.indices) for g in given_out if g.slot == i) for i in range(servers)]
    assert max(load) <= capacity and max(load) - min(load) <= size
    if len(given_out) < groups:
        assert min(load) + size > capacity, "room was left unused"


def test_only_ready_serving_slots_get_work() -> None:
    slots = [view(0, S.IDLE), view(1, S.LOST), view(2, S.ROLLOUT, serves=False), view(3, S.DRAFTING)]
    assert hand_out(works(2), slots, 8) == []
    assert {g.slot for g in hand_out(works(2), [*slots[:2], view(4, S.DRAINING)], 8)} == {4}


def test_a_server_that_is_opening_keeps_its_fair_share() -> None:
    slots = [view(0, S.ROLLOUT), view(1, S.ROLLOUT, serves=False), view(2, S.IDLE)]
    assert [(g.slot, g.work) for g in hand_out(works(4), slots, 16)] == [(0, works(4)[0]), (0, works(4)[2])]
    assert slots_to_wake(works(4), slots, 16) == []


def test_idle_slots_wake_only_for_work_that_is_left_over() -> None:
    slots = [view(0, S.ROLLOUT, 8), view(1, S.IDLE), view(2, S.IDLE)]
    assert slots_to_wake(works(1), slots, 8) == [1]
    assert slots_to_wake(works(1), [dataclasses.replace(slots[0], outstanding=4), *slots[1:]], 8) == []
    assert slots_to_wake([], slots, 8) == []


def test_a_slot_is_released_when_nothing_runs_and_nothing_waits() -> None:
    slots = [view(0, S.DRAINING, 0), view(1, S.ROLLOUT, 3)]
    assert slots_to_release([], slots) == [0]
    assert slots_to_release(works(1), slots) == []


def test_drafting_needs_idle_slots_a_busy_one_and_data() -> None:
    busy, idle = view(0, S.DRAINING, 2), view(1, S.IDLE)
    assert slots_to_draft([], [busy, idle], True, 3) == [1]
    assert slots_to_draft([], [busy, idle, view(2, S.IDLE), view(3, S.IDLE)], True, 2) == [1, 2]
    assert slots_to_draft([], [busy, view(1, S.DRAFTING), view(2, S.IDLE), view(3, S.IDLE)], True, 2) == [2]
    assert slots_to_draft([], [busy, view(1, S.DRAFTING), view(2, S.IDLE)], True, 1) == []
    assert slots_to_draft(works(1), [busy, idle], True, 3) == []
    assert slots_to_draft([], [busy, idle], False, 3) == []
    assert slots_to_draft([], [busy, idle], True, 0) == []
    assert slots_to_draft([], [view(0, S.DRAINING, 0), idle], True, 3) == []
    assert slots_to_draft([], [busy, view(1, S.LOST)], True, 3) == []
    assert slots_to_draft([], [busy, view(1, S.IDLE, can_draft=False)], True, 3) == []


def test_drafting_yields_when_rollout_ends_or_its_slot_is_needed() -> None:
    training = [view(1, S.DRAFTING), view(2, S.DRAFTING)]
    assert slots_to_preempt([], [view(0, S.DRAINING, 1), *training], 8, 9) == []
    assert slots_to_preempt([], [view(0, S.DRAINING, 0), *training], 8, 9) == [1, 2]
    full = view(0, S.DRAINING, 8)
    assert slots_to_preempt(works(1), [full, *training], 8, 9) == [1]
    assert slots_to_preempt(works(3), [full, *training], 8, 9) == [1, 2]
    assert slots_to_preempt(works(1), [full, *training, view(3, S.IDLE)], 8, 9) == []
    assert slots_to_preempt(works(1), [view(0, S.ROLLOUT, 0), *training], 8, 9) == []
    assert slots_to_preempt(works(1), [view(0, S.LOST), *training], 8, 9) == [1]


def test_trainers_yield_that_there_is_no_room_for() -> None:
    training = [view(1, S.DRAFTING), view(2, S.DRAFTING), view(3, S.DRAFTING)]
    assert slots_to_preempt([], [view(0, S.ROLLOUT, 1), *training], 8, 1) == [1, 2]
    assert slots_to_preempt(works(3), [view(0, S.ROLLOUT, 8), *training], 8, 2) == [1, 2, 3]


class Seeing(Slots):
    """Counts the looks at single slots."""

    looks = 0

    def __getitem__(self, slot: int) -> SlotView:
        self.looks += 1
        return super().__getitem__(slot)


def test_without_queued_work_no_slot_is_looked_at() -> None:
    """Each answer of thousands of servers asks anew, and work is queued in the first moments of a phase only."""
    busy, training = [view(i, S.DRAINING, 3) for i in range(50)], [view(i, S.DRAFTING) for i in range(50, 60)]
    slots = Seeing([*busy, *training])
    assert scheduler.hand_out([], slots, 8) == [] and scheduler.slots_to_wake([], slots, 8) == []
    assert scheduler.slots_to_preempt([], slots, 8, 20) == []
    assert slots.looks == 0
    assert len(scheduler.hand_out(works(3), slots, 8)) == 3 and slots.looks > 0


STATES = st.sampled_from(list(S))


@given(st.lists(st.tuples(STATES, st.integers(0, 8), st.booleans()), max_size=6), st.integers(0, 3), st.integers(0, 6))
def test_no_slot_is_told_two_things_and_training_never_exceeds_what_is_wanted(
    slots: list[tuple[SlotState, int, bool]], groups: int, wanted: int
) -> None:
    views = [view(i, state, n if state in (S.ROLLOUT, S.DRAINING) else 0, True, can)
             for i, (state, n, can) in enumerate(slots)]  # fmt: skip
    pending = works(groups)
    drafts, stops = slots_to_draft(pending, views, True, wanted), slots_to_preempt(pending, views, 8, 9)
    wakes = slots_to_wake(pending, views, 8)
    assert len({*drafts, *stops, *wakes}) == len(drafts) + len(stops) + len(wakes)
    training = sum(v.state is S.DRAFTING for v in views)
    assert training + len(drafts) <= max(wanted, training)
    assert all(views[i].state is S.DRAFTING for i in stops)
    if pending:
        assert not drafts
    left = groups - len(hand_out(pending, views, 8))
    assert len(wakes) + len(stops) == min(left, training + sum(v.state is S.IDLE for v in views)) or not pending


VIEWS = st.builds(view, st.integers(0, 5), STATES, st.integers(0, 3), st.booleans(), st.booleans())


def members(slots: Slots) -> dict[str, set[int]]:
    return {name: part for name, part in vars(slots).items() if isinstance(part, set)}


@given(st.lists(VIEWS, max_size=30))
def test_the_sets_of_slots_are_those_of_the_newest_views_whatever_was_put_before(views: list[SlotView]) -> None:
    kept, newest = Slots(), dict[int, SlotView]()
    for one in views:
        kept.put(one)
        newest[one.slot] = one
    plain = newest.values()

    def where(rule: Callable[[SlotView], bool]) -> set[int]:
        return {v.slot for v in plain if rule(v)}

    assert members(kept) == {
        "accepting": where(lambda v: v.state in (S.ROLLOUT, S.DRAINING)),
        "generating": where(lambda v: v.state in (S.ROLLOUT, S.DRAINING) and v.outstanding > 0),
        "dry": where(lambda v: v.state in (S.ROLLOUT, S.DRAINING) and v.outstanding == 0),
        "idle": where(lambda v: v.state is S.IDLE),
        "training": where(lambda v: v.state is S.DRAFTING),
        "working": where(lambda v: v.serves and v.outstanding > 0),
        "filled": where(lambda v: v.state is S.ROLLOUT and v.outstanding > 0),
    }
    assert all(kept[v.slot] is v for v in plain)


@given(st.floats(0.01, 5.0), st.integers(0, 10_000), st.floats(1.0, 1000.0), st.floats(5.0, 100.0))
def test_servers_report_no_more_often_than_all_together_may(
    stretch_s: float, servers: int, reports_per_s: float, longest_s: float
) -> None:
    pace = Pace(stretch_s, reports_per_s, longest_s)
    assert stretch_s <= pace.of(servers) <= max(stretch_s, longest_s)
    assert pace.of(servers) == longest_s or servers / pace.of(servers) <= reports_per_s * (1 + 1e-9)
    if servers / stretch_s <= reports_per_s:
        assert pace.of(servers) == stretch_s, "nobody waits longer than it must"


@given(st.integers(1, 10_000), st.floats(1e-4, 0.1), st.floats(0.15, 100.0))
def test_reports_take_their_part_of_the_coordinators_time_at_most(
    servers: int, answer_s: float, longest_s: float
) -> None:
    pace = Pace(0.15, 400.0, longest_s)
    busy = servers * answer_s / pace.of(servers, answer_s)
    assert pace.of(servers, answer_s) == longest_s or busy <= BUSY * (1 + 1e-9)
    assert pace.of(servers, answer_s) >= pace.of(servers), "reports that cost something do not come more often"


def test_servers_drain_once_nothing_waits() -> None:
    slots = [view(0, S.ROLLOUT, 2), view(1, S.ROLLOUT, 0), view(2, S.DRAINING, 1), view(3, S.IDLE)]
    assert slots_to_drain([], slots) == [0]
    assert slots_to_drain(works(1), slots) == []


def test_prompts_of_steps_pass_over_all_prompts_before_repeating() -> None:
    prompts = make_prompts(10)
    first = [p.id for step in range(1, 6) for p in prompts_of_step(prompts, step, 2, seed=1)]
    assert sorted(first) == sorted(p.id for p in prompts)
    again = [p.id for step in range(6, 11) for p in prompts_of_step(prompts, step, 2, seed=1)]
    assert sorted(again) == sorted(first) and again != first
    assert [p.id for p in prompts_of_step(prompts, 3, 4, 1)] == [p.id for p in prompts_of_step(prompts, 3, 4, 1)]
    assert len(prompts_of_step(prompts, 4, 4, 1)) == 4


def test_seeds_are_distinct_and_reproducible() -> None:
    seeds = {rollout_seed(s, l, p, i) for s in (0, 1) for l in ("a", "b") for p in range(8) for i in range(8)}  # noqa: E741
    assert len(seeds) == 2 * 2 * 8 * 8
    assert rollout_seed(0, "a", 1, 2) == rollout_seed(0, "a", 1, 2) < 2**48
