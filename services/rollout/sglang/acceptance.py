"""SGLang's acceptance counters in the project's terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from services.core.types import AcceptanceStats
from services.rollout.sglang.rounds import histograms, newest_depth
from services.speculation.strategy import OFF, DraftStrategy

Cells = dict[tuple[DraftStrategy, int], int]  # rounds by strategy and number of accepted drafts


def acceptance_stats(
    numbers: Sequence[int], num_tokens: int, strategies: Mapping[int, DraftStrategy]
) -> AcceptanceStats:
    """Accounting of one request that emitted `num_tokens` on an engine with these strategies, by depth. `numbers`:
    SGLang's histogram where there is one strategy, else as in `rounds`.

    SGLang counts every draft token that matched, also those behind a stop or past the budget, which were never emitted
    (row 5): the surplus is taken away. A prefill's token (the first one, and one after every load of a policy under
    way) belongs to no verify step. Rates from `meta_info` are not used: they take the draft width from the start-up
    arguments.
    """
    cells, newest = _cells(numbers, strategies)
    if not cells:
        switches = len(strategies) > 1
        return AcceptanceStats(steps_by_strategy={OFF.name: num_tokens} if num_tokens and not switches else {})
    _drop_surplus(cells, newest, 1 + sum((k + 1) * n for (_, k), n in cells.items()) - num_tokens)
    steps, accepted, found = Counter[str](), Counter[str](), Counter[int]()
    proposed = 0
    for (strategy, k), n in cells.items():
        steps[strategy.name] += n
        if strategy.is_off:
            continue
        found[k] += n
        accepted[strategy.name] += k * n
        proposed += n * (strategy.num_draft_tokens - 1)
    longest = max(found, default=-1)
    return AcceptanceStats(tuple(found[k] for k in range(longest + 1)), proposed, dict(steps), dict(accepted))


def _cells(numbers: Sequence[int], strategies: Mapping[int, DraftStrategy]) -> tuple[Cells, DraftStrategy]:
    """What ran, and the strategy of the newest round."""
    if len(strategies) == 1:
        (only,) = strategies.values()
        return {(only, k): n for k, n in enumerate(numbers) if n}, only
    rows = histograms(numbers)
    cells = {(strategies[depth], k): n for depth, row in rows.items() for k, n in enumerate(row) if n}
    return cells, strategies[newest_depth(numbers) or 0]


def _drop_surplus(cells: Cells, newest: DraftStrategy, surplus: int) -> None:
    """Usually the surplus lies within the last verify step. How many drafts that one accepted is not told: the smallest
    that can have held it is shortened, of the newest strategy if there is one. A stop string is seen steps later: then
    whole steps of the commonest size go first."""
    while surplus > 0:
        enough = [cell for cell in cells if cell[1] >= surplus]
        if enough:
            strategy, k = min(enough, key=lambda cell: (cell[0] != newest, cell[1]))
            _add(cells, (strategy, k), -1)
            _add(cells, (strategy, k - surplus), 1)
            return
        commonest = max(cells, key=lambda cell: (cells[cell], -cell[1]))
        _add(cells, commonest, -1)
        surplus -= commonest[1] + 1


def _add(cells: Cells, cell: tuple[DraftStrategy, int], count: int) -> None:
    cells[cell] = cells.get(cell, 0) + count
    if not cells[cell]:
        del cells[cell]
