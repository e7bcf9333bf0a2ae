from __future__ import annotations

import heapq
from itertools import pairwise

import pytest

from services.coordinator.appointments import Appointments
from services.coordinator.scheduler import Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("servers", [100, 999, 4096])
def test_first_reports_of_a_phase_come_one_after_the_other(servers: int) -> None:
    pace = Pace(0.15, 100.0, 1000.0)
    asked = Appointments(pace, Clock())
    ends = [asked.stretch_s(servers, 0.0) for _ in range(servers)]
    assert ends[0] == pytest.approx(pace.stretch_s)
    assert all(b - a == pytest.approx(0.01) for a, b in pairwise(ends)), "100 a second"


def test_a_crowd_does_not_come_again_as_a_crowd() -> None:
    """400 servers whose first reports all come at once are spread over the stretch with their next ones, and stay so:
    each is asked again when it has reported."""
    clock, pace = Clock(), Pace(0.5, 100.0, 60.0)
    asked = Appointments(pace, clock)
    due = [clock.now] * 400
    told = []
    for _ in range(1200):
        clock.now = heapq.heappop(due)
        told.append(clock.now)
        heapq.heappush(due, clock.now + asked.stretch_s(400, 0.0))
    assert told[400] - told[399] == pytest.approx(pace.stretch_s)
    assert all(b - a == pytest.approx(0.01) for a, b in pairwise(told[400:]))


def test_few_servers_report_as_often_as_they_are_to() -> None:
    asked = Appointments(Pace(0.5, 100.0, 60.0), Clock())
    assert [asked.stretch_s(50, 0.0) for _ in range(200)] == [0.5] * 200


def test_no_stretch_is_longer_than_a_lease_allows_or_shorter_than_it_should_be() -> None:
    clock = Clock()
    asked = Appointments(Pace(0.5, 100.0, 6.0), clock)
    stretches = [asked.stretch_s(1000, 0.05) for _ in range(1000)]
    assert max(stretches) == pytest.approx(6.0) and min(stretches) == pytest.approx(0.5)
    asked.begin()
    assert asked.stretch_s(1000, 0.05) == pytest.approx(0.5), "another phase: nothing is asked for yet"
