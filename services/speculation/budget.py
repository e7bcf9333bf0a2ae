"""How much to draft for each request, from how well its drafts have fared. Plain Python.

Everything here depends on earlier rounds alone. A draft shortened or lengthened because of the tokens drawn in it would
be kept for its luck, and accepted more often than its distribution says: the rollouts would not be the target's.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

_FADE = 0.95  # what a try counts a round later: about the last 20 rounds decide
_PRIOR_TRIES = 8.0  # how many tries of its own make a request count as much as all requests together


@dataclass
class AcceptanceRate:
    """Share of tried draft tokens that were accepted, recent rounds first. A token is tried when all before it were
    accepted."""

    tried: float = 0.0
    accepted: float = 0.0

    def record(self, tried: float, accepted: float) -> None:
        """One round."""
        assert 0 <= accepted <= tried
        self.tried, self.accepted = _FADE * self.tried + tried, _FADE * self.accepted + accepted

    def estimate(self, prior: float) -> float:
        """Between `prior` when nothing was tried and what was seen."""
        return (self.accepted + _PRIOR_TRIES * prior) / (self.tried + _PRIOR_TRIES)


def expected_accepted(rates: Sequence[float]) -> float:
    """Accepted tokens to expect of a chain whose j-th token is accepted with rates[j] once all before it are."""
    total, reach = 0.0, 1.0
    for rate in rates:
        reach *= rate
        total += reach
    return total


def share_budget(expected: Sequence[float], budget: int, deepest: int) -> tuple[int, ...]:
    """Draft tokens of each request, at most `deepest` each and `budget` together, that make the accepted tokens to
    expect the most: request r's k-th is accepted with probability expected[r] ** k.

    Greedy, and exact: what one more token brings a request falls with every token it has. Equal gains go to the request
    that comes first.
    """
    assert all(0 <= p <= 1 for p in expected) and budget >= 0 and deepest >= 0
    lengths = [0] * len(expected)
    offers = [(-p, r) for r, p in enumerate(expected) if p > 0 and deepest]
    heapq.heapify(offers)
    for _ in range(budget):
        if not offers:
            break
        gain, r = heapq.heappop(offers)
        lengths[r] += 1
        if lengths[r] < deepest:
            heapq.heappush(offers, (gain * expected[r], r))
    return tuple(lengths)
