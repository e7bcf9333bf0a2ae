from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import ServiceLostError, WaitTimeoutError
from services.core.part import Part
from services.simulator.agenda import Agenda, VirtualWaiter


def waiter(turn_s: float = 0.0) -> VirtualWaiter:
    return VirtualWaiter(Agenda(), turn_s, lambda: 0.0)


@given(st.lists(st.floats(0, 100), max_size=30))
def test_events_happen_in_order_of_time_and_then_of_being_put_down(times: list[float]) -> None:
    agenda, seen = Agenda(), list[tuple[float, int]]()
    for i, time_s in enumerate(times):
        agenda.at(time_s, lambda i=i: seen.append((agenda.now, i)))  # type: ignore[misc]
    while agenda.next_s is not None:
        agenda.step()
    assert seen == sorted((t, i) for i, t in enumerate(times))


def test_waiting_goes_to_the_first_answer_and_through_the_turn_behind_it() -> None:
    w = waiter(turn_s=0.5)
    calls = [w.call(f"c{i}") for i in range(3)]
    for call, time_s in zip(calls, (2.0, 2.4, 3.0), strict=True):
        w.agenda.at(time_s, lambda call=call: call.settle(call.what))  # type: ignore[misc]
    assert w.wait(calls, 10.0) == calls[:2] and w.agenda.now == 2.5
    assert w.wait(calls[2:], 0.1) == [] and w.agenda.now == 2.6
    assert [c.result(0) for c in calls[:2]] == ["c0", "c1"]


def test_time_passes_when_nothing_comes_and_timers_can_be_due() -> None:
    w = waiter()
    assert w.wait([], 1.5) == [] and w.agenda.now == 1.5


def test_the_parts_of_an_answer_are_ready_together_even_when_asked_for_later() -> None:
    w = waiter()
    call = w.call("both")
    first, second = Part(call, 0), Part(call, 1)
    w.agenda.at(1.0, lambda: call.settle((7, "blob")))
    assert w.wait([first], 5.0) == [first]
    assert w.wait([second], 5.0) == [second] and w.agenda.now == 1.0
    assert (first.result(0), second.result(0)) == (7, "blob")


def test_only_the_first_end_of_a_call_counts_and_errors_are_raised() -> None:
    w = waiter()
    call = w.call("x")
    call.fail(ServiceLostError("x", "killed"))
    call.settle(1)
    with pytest.raises(ServiceLostError):
        call.result(0)
    assert w.answers == 1


def test_an_answer_that_does_not_come_is_a_time_out_that_names_the_call() -> None:
    with pytest.raises(WaitTimeoutError, match=r"rollout-3\.advance"):
        waiter().call("rollout-3.advance").result(1.0)
