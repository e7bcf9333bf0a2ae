"""What the selector chose and why, round by round, kept in as few records as tell it."""

from __future__ import annotations

import math

from services.core.spans import folded, lengthened
from services.core.types import StrategySpan
from services.speculation.round import Choice

FORCED = "forced"
KEPT_SPANS = 24  # told with one report


class ChoiceLog:
    """`note` after each round, `take` with each report. What is kept does not grow with the number of rounds."""

    def __init__(self, limit: int = KEPT_SPANS) -> None:
        self._limit = limit
        self._spans: list[StrategySpan] = []

    def note(self, choice: Choice, running: int, tokens: int, start_s: float, end_s: float) -> None:
        """A round of `running` requests that committed `tokens`, on the engine's clock."""
        known = _finite(choice.expected) and _finite(choice.expected_off)
        span = StrategySpan(
            start_s=start_s,
            end_s=end_s,
            strategy=choice.strategy.name,
            reason=choice.reason,
            rounds=1,
            rounds_s=end_s - start_s,
            verify_steps=running,
            tokens=tokens,
            running_first=running,
            running_last=running,
            on_s=tokens / choice.expected if known else None,
            off_s=tokens / choice.expected_off if known else None,
        )
        self._spans = lengthened(self._spans, span)
        if len(self._spans) > 2 * self._limit:  # not at every round beyond the limit
            self._spans = folded(self._spans, self._limit)

    def take(self) -> tuple[StrategySpan, ...]:
        """Those since the last call, on the engine's clock."""
        taken, self._spans = folded(self._spans, self._limit), []
        return tuple(taken)


def _finite(rate: float) -> bool:
    return math.isfinite(rate) and rate > 0
