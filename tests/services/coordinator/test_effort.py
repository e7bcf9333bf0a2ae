"""What a report costs is measured from the seconds in which the coordinator does not wait, a window of reports each."""

from __future__ import annotations

import pytest

from services.coordinator.effort import NEWEST, WINDOW, Effort


class Coordinator:
    """Busy for `busy_s` with each report, after it has waited `idle_s` for it."""

    def __init__(self) -> None:
        self.now_s = self.waited_s = 0.0
        self.effort = Effort(lambda: self.now_s, lambda: self.waited_s)

    def reports(self, count: int, busy_s: float, idle_s: float) -> None:
        for _ in range(count):
            self.now_s += idle_s
            self.waited_s += idle_s
            self.effort.reported()
            self.now_s += busy_s


def test_nothing_is_known_before_a_window_of_reports_is_over() -> None:
    it = Coordinator()
    it.reports(WINDOW, 0.25, 0.5)
    assert it.effort.answer_s == 0.0
    it.reports(1, 0.25, 0.5)
    assert it.effort.answer_s == pytest.approx(0.25), "waiting is no effort"


def test_the_newest_window_counts_as_much_as_all_before() -> None:
    it = Coordinator()
    it.reports(WINDOW, 0.25, 0.0)
    it.reports(WINDOW + 1, 0.75, 0.0)
    assert it.effort.answer_s == pytest.approx(0.25 + NEWEST * 0.5)


def test_what_happens_between_two_phases_is_no_reports_doing() -> None:
    it = Coordinator()
    it.reports(WINDOW // 2, 0.25, 0.0)
    it.now_s += 1000.0  # the policy is trained
    it.effort.begin()
    it.reports(WINDOW + 1, 0.25, 0.0)
    assert it.effort.answer_s == pytest.approx(0.25)


def test_a_clock_that_stands_still_while_answers_are_dealt_with_tells_of_no_effort() -> None:
    """The simulator's: what it simulates does not depend on how fast this machine is."""
    it = Coordinator()
    it.reports(5 * WINDOW, 0.0, 1.5)
    assert it.effort.answer_s == 0.0
