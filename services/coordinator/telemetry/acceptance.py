"""What requests' running totals of acceptance grew by between two reports."""

from __future__ import annotations

from collections.abc import Iterator

from services.core.types import AcceptanceStats, ServerReport

_NOTHING = (0, AcceptanceStats())


class AcceptanceGrowth:
    """Servers tell totals per request. A request that begins again after a loss has fewer tokens than before, and
    counts from nothing; one that moved to another server brings its totals along."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, AcceptanceStats]] = {}

    def forget(self) -> None:
        self._told.clear()

    def of(self, report: ServerReport) -> Iterator[tuple[AcceptanceStats, AcceptanceStats]]:
        """(total before, total now) of every request of the report."""
        for rollout in report.finished:
            now = (len(rollout.response_ids), rollout.acceptance)
            yield self._before(rollout.rollout_id, now[0]), now[1]
            self._told.pop(rollout.rollout_id, None)
        for request in report.running:
            yield self._before(request.rollout_id, request.num_tokens), request.acceptance
            self._told[request.rollout_id] = (request.num_tokens, request.acceptance)

    def _before(self, rollout_id: str, num_tokens: int) -> AcceptanceStats:
        told_tokens, told = self._told.get(rollout_id, _NOTHING)
        return told if told_tokens <= num_tokens else AcceptanceStats()


def growth(before: AcceptanceStats, now: AcceptanceStats) -> tuple[dict[str, int], dict[str, int], int]:
    """(verify steps by strategy, accepted tokens by strategy, proposed tokens), none below zero: SGLang's last word on
    a response may take back tokens behind its stop."""
    steps = {s: max(0, n - before.steps_by_strategy.get(s, 0)) for s, n in now.steps_by_strategy.items()}
    accepted = {s: max(0, n - before.accepted_by_strategy.get(s, 0)) for s, n in now.accepted_by_strategy.items()}
    return steps, accepted, max(0, now.proposed - before.proposed)
