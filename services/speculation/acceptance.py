"""Acceptance accounting per request."""

from __future__ import annotations

from collections import Counter

from services.core.types import AcceptanceStats


class AcceptanceCounter:
    """Counts verify steps by what they committed, so that the counters never run past the emitted tokens (row 5)."""

    def __init__(self, earlier: AcceptanceStats | None = None) -> None:
        """`earlier`: what another server counted of the same response."""
        earlier = earlier or AcceptanceStats()
        self._histogram: Counter[int] = Counter(dict(enumerate(earlier.histogram)))
        self._steps: Counter[str] = Counter(earlier.steps_by_strategy)
        self._accepted: Counter[str] = Counter(earlier.accepted_by_strategy)
        self._proposed = earlier.proposed

    def plain(self, strategy: str) -> None:
        """A decode step without a draft."""
        self._steps[strategy] += 1

    def verify(self, strategy: str, proposed: int, emitted: int) -> None:
        """A verify step that committed `emitted` tokens, the bonus among them: emitted - 1 draft tokens accepted.

        When a stop or the budget cuts inside the accepted run, what was cut does not count as accepted.
        """
        assert 1 <= emitted <= proposed + 1
        self._histogram[emitted - 1] += 1
        self._proposed += proposed
        self._steps[strategy] += 1
        self._accepted[strategy] += emitted - 1

    def stats(self) -> AcceptanceStats:
        longest = max(self._histogram, default=-1)
        histogram = tuple(self._histogram[k] for k in range(longest + 1))
        return AcceptanceStats(histogram, self._proposed, dict(self._steps), dict(self._accepted))
