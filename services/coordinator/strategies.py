"""What servers told of the strategies they ran, put on the run's clock and written down; and what that gained."""

from __future__ import annotations

from collections.abc import Callable

from services.coordinator.timeline import Timeline
from services.core.spans import folded, lengthened
from services.core.types import ServerReport, StrategySpan

# A stretch that goes on longer is told in parts, so that a kill costs no more and a reader of a live run sees it.
TELL_S = 5.0
TOLD_SPANS = 24  # of a slot at a time


class StrategyLog:
    """`emit` gets each span once it is over, or has gone on for TELL_S."""

    def __init__(self, timeline: Timeline, emit: Callable[[StrategySpan], None]) -> None:
        self._timeline, self._emit = timeline, emit
        self._open: dict[int, list[StrategySpan]] = {}
        self._label = ""
        self._on_s = self._off_s = 0.0

    def reported(self, slot: int, report: ServerReport) -> None:
        """A report that came just now: its spans end with it."""
        now, label = self._timeline.now(), self._timeline.label
        if label != self._label:
            self._label, self._on_s, self._off_s = label, 0.0, 0.0
        spans = self._open.get(slot, [])
        for span in report.spans:
            spans = lengthened(spans, span.moved(now, f"slot {slot}", label))
            if span.off_s is not None:
                self._off_s += span.off_s
                self._on_s += span.rounds_s
        self._open[slot] = spans
        if spans and now - spans[0].start_s >= TELL_S:
            self._tell(slot)

    def close(self) -> None:
        """Tell what is still open: a phase is over, or the run."""
        for slot in list(self._open):
            self._tell(slot)

    @property
    def achieved_gain(self) -> float | None:
        """Of the phase under way, of all slots together: the seconds that its tokens would have taken with OFF over
        those that their rounds took. Only rounds with a prediction count; None when there was none."""
        known = self._label == self._timeline.label and self._on_s > 0
        return self._off_s / self._on_s if known else None

    def _tell(self, slot: int) -> None:
        for span in folded(self._open.pop(slot), TOLD_SPANS):
            self._emit(span)
