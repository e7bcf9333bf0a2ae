"""When each server reports next: where there are many, one after the other."""

from __future__ import annotations

import math

from services.coordinator.scheduler import Pace
from services.core.protocols import Clock


class Appointments:
    """Stretches by `pace`, so that reports come evenly: one that is asked for now is due after all others that are.

    With equal stretches a crowd of reports, which a slow moment or the start of a phase makes, would come again as a
    crowd with every stretch. Where servers are so few that none has to report less often for their number, each gets
    its own stretch at once.
    """

    def __init__(self, pace: Pace, clock: Clock) -> None:
        self._pace, self._clock = pace, clock
        self._last_s = -math.inf  # when the last report is due

    def begin(self) -> None:
        """A phase begins: no server has been asked for anything."""
        self._last_s = -math.inf

    def stretch_s(self, servers: int, answer_s: float) -> float:
        """Seconds for which the server that is asked now generates; so many have work, `servers` > 0. `answer_s` as for
        Pace."""
        pace, now = self._pace, self._clock()
        full_s = pace.of(servers, answer_s)
        if full_s <= pace.stretch_s:
            return full_s
        due_s = max(self._last_s + full_s / servers, now + pace.stretch_s)
        self._last_s = min(due_s, now + pace.longest_s)
        return self._last_s - now
