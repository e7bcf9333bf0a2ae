"""Slot seconds and idle windows from lease changes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.coordinator.leases import NEXT, SERVING
from services.coordinator.telemetry.slots import SlotTimes, WorkTimes
from services.core.types import SlotState

S = SlotState


class Book:
    def __init__(self, slots: int = 2) -> None:
        self.seconds: dict[tuple[int, SlotState], float] = {}
        self.windows: list[float] = []
        self.times = SlotTimes(slots, 0.0, self.spent, self.windows.append)

    def spent(self, slot: int, state: SlotState, seconds: float) -> None:
        self.seconds[slot, state] = self.seconds.get((slot, state), 0.0) + seconds


def test_a_window_is_from_running_dry_until_the_last_one_ends() -> None:
    book = Book()
    for slot in (0, 1):
        book.times.change(slot, S.ROLLOUT, 1.0)
    book.times.change(0, S.IDLE, 5.0)
    book.times.change(0, S.DRAFTING, 5.5)  # the window goes on while its slot trains
    book.times.change(1, S.DRAINING, 6.0)
    book.times.change(1, S.IDLE, 9.0)
    assert book.windows == [4.0]
    book.times.change(0, S.IDLE, 9.5)  # its last micro-step ends when nobody generates any more
    book.times.tick(11.0)
    assert book.windows == [4.0]
    assert book.seconds[0, S.DRAFTING] == 4.0 and book.seconds[0, S.IDLE] == 1.0 + 0.5 + 1.5
    assert book.seconds[1, S.DRAINING] == 3.0


def test_a_window_ends_when_work_comes_back_or_the_slot_is_lost() -> None:
    book = Book(3)
    for slot in range(3):
        book.times.change(slot, S.ROLLOUT, 0.0)
    book.times.change(0, S.IDLE, 1.0)
    book.times.change(1, S.IDLE, 2.0)
    book.times.change(0, S.ROLLOUT, 4.0)
    book.times.change(1, S.LOST, 7.0)
    assert book.windows == [3.0, 5.0]


def test_servers_released_together_leave_no_window() -> None:
    book = Book()
    for slot in (0, 1):
        book.times.change(slot, S.ROLLOUT, 0.0)
    book.times.change(0, S.IDLE, 3.0)
    book.times.change(1, S.IDLE, 3.0001)
    assert book.windows == []


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.floats(0, 10), st.booleans()), max_size=60))
def test_every_second_of_every_slot_counts_once(moves: list[tuple[int, int, float, bool]]) -> None:
    book, now, free = Book(3), 0.0, 0.0
    for slot, choice, passed, tick in moves:
        states = book.times.states
        if any(s in SERVING for s in states):
            free += passed * sum(s in (S.IDLE, S.DRAFTING) for s in states)
        now += passed
        if tick:
            book.times.tick(now)
        allowed = sorted(NEXT[book.times.states[slot]])
        book.times.change(slot, allowed[choice % len(allowed)], now)
    book.times.tick(now)
    for slot in range(3):
        assert sum(n for (s, _), n in book.seconds.items() if s == slot) == pytest.approx(now)
    assert sum(book.windows) <= free + 1e-6, "a window is time in which a slot was free beside one that generates"


def test_work_is_counted_while_it_lasts_and_once() -> None:
    seconds: dict[str, float] = {}
    work = WorkTimes(lambda holder, s: seconds.update({holder: seconds.get(holder, 0.0) + s}))
    work.begin("policy", 10.0)
    work.tick(14.0)
    assert seconds["policy"] == 4.0
    work.begin("policy", 15.0)  # the phase is told again
    work.tick(16.0)
    work.end("policy", 7.5)
    work.tick(30.0)
    assert seconds["policy"] == 7.5
    work.end("reward", 2.0)  # it began before anybody listened
    assert seconds["reward"] == 2.0


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(list(SlotState))), max_size=30))
def test_the_counts_are_those_of_the_states(changes: list[tuple[int, SlotState]]) -> None:
    times = SlotTimes(4, 0.0, lambda slot, state, seconds: None, lambda seconds: None)
    for now, (slot, state) in enumerate(changes, 1):
        times.change(slot, state, float(now))
        assert +times.counts == Counter(times.states)
