"""What a token costs at each server, learnt from its reports: the cost model of consolidation. Pure; no clock.

Rates are kept by the number of running requests, since a round over more of them takes longer. Every server is measured
by itself; what one has not shown yet is taken from all of them together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field

from services.core.types import ServerReport

# A report weighs this much less with each later one of its kind: about ten reports count, which smooths engines that
# tell their tokens in lumps, and a new policy or strategy shows within seconds.
DECAY = 0.9


@dataclass(slots=True)
class _Rate:
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = DECAY * self.tokens + tokens
        self.seconds = DECAY * self.seconds + seconds


@dataclass(slots=True)
class _Table:
    """Rates of all requests together by how many there were."""

    by_running: dict[int, _Rate] = field(default_factory=lambda: defaultdict(_Rate))
    prefill: _Rate = field(default_factory=_Rate)
    _points: list[tuple[int, float]] | None = None  # of what was added last

    def add(self, running: int, tokens: float, seconds: float) -> None:
        self.by_running[running].add(tokens, seconds)
        self._points = None

    def points(self) -> list[tuple[int, float]]:
        """(running, seconds that a token of one of them takes), ascending and never falling: where fewer requests
        seemed slower than more, that was noise, and moving must not look free because of it."""
        if self._points is None:
            self._points = self._fresh_points()
        return self._points

    def _fresh_points(self) -> list[tuple[int, float]]:
        points: list[tuple[int, float]] = []
        slowest = 0.0
        for running, rate in sorted(self.by_running.items()):
            if rate.tokens > 0 and rate.seconds > 0:
                slowest = max(slowest, running * rate.seconds / rate.tokens)
                points.append((running, slowest))
        return points


class RateBook:
    def __init__(self) -> None:
        self._tables: dict[int, _Table] = defaultdict(_Table)
        self._all = _Table()

    def note(self, slot: int, report: ServerReport) -> None:
        """Take one report. With requests waiting, the number that runs changes all the time: it tells nothing."""
        seconds = report.busy_s - report.prefill_s
        running = len(report.running) + (len(report.finished) + 1) // 2  # those that ended did so somewhere within
        for table in (self._tables[slot], self._all):
            if report.prefill_tokens:
                table.prefill.add(report.prefill_tokens, report.prefill_s)
            if not report.waiting and running and seconds > 0:
                table.add(running, report.new_tokens, seconds)

    def knows(self, slot: int) -> bool:
        return bool(self._points(slot))

    def seconds_per_token(self, slot: int, running: int) -> float:
        """Seconds that one token of one request takes while `running` are under way; only where `knows`.

        Between measured numbers linear; beyond the largest as if no throughput were won; below the smallest its own.
        """
        points = self._points(slot)
        assert points and running >= 1
        at = bisect_left(points, (running, 0.0))
        if at == len(points):
            most, seconds = points[-1]
            return seconds * running / most
        right, above = points[at]
        if right == running or at == 0:
            return above
        left, below = points[at - 1]
        return below + (above - below) * (running - left) / (right - left)

    def prefill_rate(self, slot: int) -> float:
        """Tokens per second. Where no engine told: the most that decoding reached, which prefill surpasses."""
        for table in (self._tables[slot], self._all):
            if table.prefill.seconds > 0:
                return table.prefill.tokens / table.prefill.seconds
        return max(running / seconds for running, seconds in self._points(slot))

    def _points(self, slot: int) -> list[tuple[int, float]]:
        return self._tables[slot].points() or self._all.points()
