"""Turns over many calls at once: in order, a bounded number at a time, and no answer that is there counts as late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.coordinator.calls import AT_ONCE, Calls
from services.core.protocols import Pending
from services.simulator.agenda import Agenda, VirtualWaiter


class Crowd:
    """`count` calls that are all answered at second 1, with a second and a half of patience; a turn takes a second."""

    def __init__(self, count: int) -> None:
        self.agenda = Agenda()
        self.waiter = VirtualWaiter(self.agenda, 0.0, lambda: 0.0)
        self.calls = Calls(self.waiter, self.agenda)
        self.done: list[int] = []
        self.lost: list[str] = []
        self.waited_s: list[float] = []
        for number in range(count):
            call = self.waiter.call(f"server-{number}.advance")
            self.agenda.at(1.0, lambda call=call, number=number: call.settle(number))  # type: ignore[misc]
            self.calls.post(f"server-{number}", call, self.told, self.lost.append, 1.5)

    def told(self, number: int) -> None:
        self.done.append(number)
        self.waited_s.append(self.agenda.now - self.calls.answered_s)

    def turn(self) -> None:
        self.calls.turn(2.0)
        self.agenda.now += 1.0


def test_a_crowd_of_answers_is_dealt_with_in_parts_oldest_calls_first() -> None:
    crowd = Crowd(2 * AT_ONCE + 5)
    crowd.turn()
    assert crowd.done == list(range(AT_ONCE))
    crowd.turn()
    crowd.turn()
    assert crowd.done == list(range(2 * AT_ONCE + 5)) and not crowd.lost, "overdue long since, but they have answered"
    assert [crowd.waited_s[0], crowd.waited_s[AT_ONCE], crowd.waited_s[-1]] == [0.0, 1.0, 2.0]


def test_who_has_not_answered_in_time_is_lost_all_the_same() -> None:
    crowd = Crowd(AT_ONCE + 1)
    silent = crowd.waiter.call("server-x.advance")
    crowd.calls.post("server-x", silent, crowd.told, crowd.lost.append, 1.5)
    crowd.turn()
    crowd.turn()
    assert len(crowd.done) == AT_ONCE + 1
    assert crowd.lost == ["no answer to server-x.advance within 2 s"] and not crowd.calls.outstanding("server-x")


def test_seconds_with_nothing_to_do_are_told_apart_from_those_of_answers() -> None:
    crowd = Crowd(1)
    crowd.turn()  # the answer comes after a second, and a second is spent on it
    crowd.calls.turn(0.5)
    assert crowd.agenda.now == 2.5 and crowd.calls.waited_s == 1.5


def test_only_what_is_still_wanted_is_waited_for() -> None:
    asked: list[list[str]] = []

    class Seeing(VirtualWaiter):
        def wait(self, pending: Sequence[Pending[Any]], timeout_s: float) -> list[Pending[Any]]:
            asked.append([p.what for p in pending])
            return super().wait(pending, timeout_s)

    agenda = Agenda()
    waiter, done = Seeing(agenda, 0.0, lambda: 0.0), list[str]()
    calls = Calls(waiter, agenda)
    for number, owner in enumerate("aabc"):
        call = waiter.call(f"{owner}{number}")
        agenda.at(1.0 + number, lambda call=call: call.settle(call.what))  # type: ignore[misc]
        calls.post(owner, call, done.append, done.append, 9.0)
    calls.turn(1.5)
    calls.drop("b")
    calls.turn(1.5)
    calls.turn(9.0)
    assert asked == [["a0", "a1", "b2", "c3"], ["a1", "c3"], ["c3"]]
    assert done == ["a0", "a1", "c3"]
