"""How drafts of a recorded run were accepted, as one law for all of its strategies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from services.core.errors import DataError
from services.core.types import AcceptanceStats
from services.simulator.law import Law, position_rates
from services.simulator.learning import POSITIONS
from services.simulator.run_record import RecordedRun
from services.speculation.cost_table import LOOK_UP
from services.speculation.strategy import DraftStrategy, draft_strategy

LOOKED_UP = 0.05  # of a run's verify steps: so many may be look-ups, whose acceptance is not known by position


def acceptance_of(run: RecordedRun) -> tuple[float, ...]:
    """By position of a chain, given those before: under it the strategies that ran, trees among them, accept as often
    as they did. Empty where nothing was drafted. Raises DataError for drafts that were looked up."""
    known = {s.name: s for s in map(draft_strategy, run.config.speculation.strategies)}
    stats = AcceptanceStats.merged(AcceptanceStats(r.histogram, 0, r.steps_by_strategy) for r in run.responses)
    steps = Counter({known[n]: c for n, c in stats.steps_by_strategy.items() if n in known and not known[n].is_off})
    looked_up = sum(count for strategy, count in steps.items() if strategy.drafter in LOOK_UP)
    if looked_up > LOOKED_UP * steps.total():
        raise DataError(
            f"{run.name} drafted by looking up in {looked_up} of {steps.total()} verify steps, whose acceptance does "
            "not follow from the drafter's: leave suffix, hybrid and ngram out of speculation.selector"
        )
    learned = {strategy: count for strategy, count in steps.items() if strategy.drafter not in LOOK_UP}
    return _chain(learned, stats.histogram)


def _chain(steps: Mapping[DraftStrategy, int], histogram: Sequence[int]) -> tuple[float, ...]:
    chain = tuple[float, ...]()
    for k in range(max((strategy.depth for strategy in steps), default=0)):
        chain = (*chain, _rate(steps, chain, sum(histogram[k + 1 :])))
    return chain


def _rate(steps: Mapping[DraftStrategy, int], before: tuple[float, ...], wanted: int) -> float:
    """At the next position: as many accept `len(before) + 1` drafts as did. By bisection."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        law = Law(((*before, middle) + (0.0,) * POSITIONS)[:POSITIONS], ())
        if sum(count * _reach(strategy, law, len(before) + 1) for strategy, count in steps.items()) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _reach(strategy: DraftStrategy, law: Law, depth: int) -> float:
    """How often it accepts so many drafts in a row."""
    rates = position_rates(strategy, law)
    return math.prod(offered * rate for offered, rate in rates[:depth]) if len(rates) >= depth else 0.0
