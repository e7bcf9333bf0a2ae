"""What a report costs the coordinator, measured as the run goes: the servers' pace follows from it."""

from __future__ import annotations

from collections.abc import Callable

from services.core.protocols import Clock

# Reports between two looks. An average of fewer jumps with each group that is handed to the reward workers.
WINDOW = 64
NEWEST = 0.5  # the share of the newest look in the average


class Effort:
    """`answer_s`: seconds that the coordinator is busy for each report with all that follows from it, the transport's
    part and waiting for a processor included; 0 before the first look. `waited_s` tells for how long it has waited in
    all with nothing to do, on `clock`."""

    def __init__(self, clock: Clock, waited_s: Callable[[], float]) -> None:
        self._clock, self._waited_s = clock, waited_s
        self._since: float | None = None  # the busy seconds at which the window began
        self._reports = 0
        self.answer_s = 0.0

    def begin(self) -> None:
        """A phase begins: what happens before its first report is no report's doing."""
        self._since = None

    def reported(self) -> None:
        """A report is about to be dealt with."""
        busy_s = self._clock() - self._waited_s()
        if self._since is None:
            self._since, self._reports = busy_s, 0
        elif self._reports == WINDOW:
            newest = (busy_s - self._since) / WINDOW
            self.answer_s += (newest - self.answer_s) * (NEWEST if self.answer_s else 1.0)
            self._since, self._reports = busy_s, 0
        self._reports += 1
