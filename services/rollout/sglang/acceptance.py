"""SGLang's acceptance counters in the project's terms."""

from __future__ import annotations

from collections.abc import Sequence

from services.core.types import AcceptanceStats
from services.speculation.strategy import OFF, DraftStrategy


def acceptance_stats(histogram: Sequence[int], num_tokens: int, strategy: DraftStrategy) -> AcceptanceStats:
    """Accounting of one request that emitted `num_tokens`.

    SGLang's histogram counts every draft token that matched, also those behind a stop or past the budget, which were
    never emitted (row 5): the surplus is taken away. A prefill's token (the first one, and one after every load of a
    policy under way) belongs to no verify step. Rates from `meta_info` are not used: they take the draft width from the
    start-up arguments.
    """
    if not any(histogram):
        return AcceptanceStats(steps_by_strategy={OFF.name: num_tokens} if num_tokens else {})
    counts = _without_surplus(list(histogram), num_tokens)
    steps = sum(counts)
    by_strategy = {strategy.name: steps} if steps else {}
    accepted = {strategy.name: sum(k * n for k, n in enumerate(counts))} if steps else {}
    return AcceptanceStats(tuple(counts), steps * (strategy.num_draft_tokens - 1), by_strategy, accepted)


def _without_surplus(counts: list[int], num_tokens: int) -> list[int]:
    """Usually the surplus lies within the last verify step. Which one that was is not told: the smallest that can have
    held it is shortened. A stop string is seen steps later: then whole steps of the commonest size go first."""
    surplus = 1 + sum((k + 1) * n for k, n in enumerate(counts)) - num_tokens
    while surplus > 0:
        last = next((k for k, n in enumerate(counts) if n and k >= surplus), None)
        if last is None:
            whole = counts.index(max(counts))
            counts[whole] -= 1
            surplus -= whole + 1
        else:
            counts[last] -= 1
            counts[last - surplus] += 1
            surplus = 0
    while counts and not counts[-1]:
        counts.pop()
    return counts
