"""What the next round will cost: a cost table, corrected by what rounds really took.

The correction is a factor per strategy and batch bucket, learned in logarithms. A bucket that a strategy has not been
seen in takes over the strategy's factor of its latest rounds, which happened at nearby batch sizes; a strategy that has
not been seen takes over part of everybody's factor.

One factor more is the machine's pace, which every round tells of and all strategies share. Without it, a processor that
others slow down for some seconds (rounds of 6 ms took 10) makes the strategy in use look dear beside those that were
last run at full pace, and those that were last run slowly stay dear when it is fast again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from services.speculation.cost_table import NETWORK, CostPoint, CostTable
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.strategy import DraftStrategy

ROUND_NOISE = 0.05  # relative, of one round's time
_KEEP, _RECENT = 50, 12  # rounds that a bucket's and a strategy's factor remember
_BRIEF = 4  # and the machine's pace
_YOUNG = 4  # rounds of a strategy; what is off in the next one is then taken for the machine's by half
_STEP = 0.15  # the least that a round may lie beside the estimate, in logarithms, to count in full
_OWN_RANGE = 0.01  # a bucket spans batch sizes and contexts: its factor is never known better
_LEAST_SPREAD = 0.15  # of a table's prediction at a place that was not measured
_SHARED = 0.5  # how much of a common factor a measured table's unseen strategies take over


def batch_bucket(running: int) -> int:
    """Half octaves: 1, 2, 3, 4, 6, 8, 11, 16 ..."""
    return round(2 * math.log2(running))


@dataclass(slots=True)
class _Factor:
    """A running mean of log(measured / predicted) that forgets slowly. `weight`: rounds it rests on. A round far beside
    it counts as one at the edge of what is usual, `_STEP` or twice the mean distance: one outlier moves little, rounds
    that all lie far away widen what is usual and are followed."""

    mean: float
    weight: float = 0.0
    distance: float = 4 * _STEP

    def tell(self, value: float, keep: int) -> None:
        beside = value - self.mean
        limit = max(_STEP, 2 * self.distance)
        self.weight = min(self.weight + 1, keep)
        self.mean += max(-limit, min(limit, beside)) / (self.weight + 0.5)
        self.distance += (min(abs(beside), 2 * limit) - self.distance) / 4


class CostModel:
    """`seconds` is the prediction, `spread` its relative standard deviation."""

    def __init__(self, table: CostTable | None = None) -> None:
        """Without a table: `CostTable.typical()`, of whose scale nothing is believed."""
        self._shared = _SHARED if table else 1.0
        self.table = table or CostTable.typical()
        self._buckets: dict[tuple[str, int], _Factor] = {}
        self._strategies: dict[str, _Factor] = {}
        self._common = _Factor(0.0)
        self._extend = _Factor(0.0)
        self._machine = _Factor(0.0)

    @classmethod
    def fit(cls, points: Sequence[CostPoint]) -> CostModel:
        return cls(CostTable.fit(points))

    def to_json(self) -> str:
        """Its table, to be read by people and by `from_json`."""
        return self.table.to_json()

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        return cls(CostTable.from_json(text))

    def state(self) -> dict[str, Any]:
        """The table and what rounds taught, as plain values."""
        return {
            "table": self.table.state(),
            "shared": self._shared,
            "buckets": [[*key, *astuple(factor)] for key, factor in self._buckets.items()],
            "strategies": [[name, *astuple(factor)] for name, factor in self._strategies.items()],
            "common": list(astuple(self._common)),
            "extend": list(astuple(self._extend)),
            "machine": list(astuple(self._machine)),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> CostModel:
        model = cls(CostTable.of(state["table"]))
        model._shared = state["shared"]
        model._buckets = {(name, bucket): _Factor(*rest) for name, bucket, *rest in state["buckets"]}
        model._strategies = {name: _Factor(*rest) for name, *rest in state["strategies"]}
        for name in ("common", "extend", "machine"):
            setattr(model, f"_{name}", _Factor(*state[name]))
        return model

    def seconds(self, strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        """Expected wall seconds of a round with `strategy`, stage by stage."""
        base = self._base(strategy, view)
        factor = math.exp(self._log_factor(strategy.name, view.running) + self._machine.mean)
        extend = base.extend * self._extend_factor()
        return StageSeconds(extend, base.draft * factor, base.verify * factor, base.rest * factor)

    def catching_up(self, strategy: DraftStrategy, running: int, tokens: float) -> float:
        """What `tokens` more that the drafter has not seen add to a round, in seconds."""
        return tokens * self.table.line(strategy, running).behind * self._extend_factor()

    def spread(self, strategy: DraftStrategy, view: RoundView) -> float:
        """Relative standard deviation of `seconds`' total."""
        variance = max(self.table.spread, _LEAST_SPREAD) ** 2
        seen = self._strategies.get(strategy.name)
        if seen is not None:
            variance = min(variance, variance / 4 + ROUND_NOISE**2 / seen.weight)
        own = self._buckets.get((strategy.name, batch_bucket(view.running)))
        if own is not None:
            variance = 1 / (1 / variance + own.weight / ROUND_NOISE**2) + _OWN_RANGE**2
        return math.sqrt(variance)

    def observe(self, outcome: RoundOutcome) -> None:
        """Correct by a round. An extend stage that was timed apart corrects the price of catching up, the other stages
        the strategy's factor. A suffix index catches up as well; that is not laid on its rounds' price: it would have
        to be done sooner or later, and a strategy that is checked now and then would look as dear as that for good."""
        base, measured = self._base(outcome.strategy, outcome.view), outcome.seconds
        timed_apart = measured.extend > 0 and (base.extend > 0 or outcome.strategy.drafter not in NETWORK)
        predicted, took = base.total, measured.total
        if timed_apart:
            predicted, took = predicted - base.extend, took - measured.extend
        if timed_apart and base.extend > 0:
            self._extend.tell(math.log(measured.extend / base.extend) - self._everybodys(), _KEEP)
        if min(predicted, took) <= 0:  # a clock too coarse for the round
            return
        self._learn(outcome.strategy.name, outcome.view.running, math.log(took / predicted))

    def _base(self, strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        return self.table.line(strategy, view.running).at(view)

    def _extend_factor(self) -> float:
        return math.exp(self._extend.mean + self._everybodys())

    def _everybodys(self) -> float:
        """What a price has in common with all others."""
        return self._common_part() + self._machine.mean

    def _learn(self, name: str, running: int, value: float) -> None:
        key, expected = (name, batch_bucket(running)), self._log_factor(name, running)
        value -= self._pace(name, value - expected)
        self._buckets.setdefault(key, _Factor(expected)).tell(value, _KEEP)
        self._strategies.setdefault(name, _Factor(expected)).tell(value, _RECENT)
        self._common.tell(value, _RECENT)

    def _pace(self, name: str, beside: float) -> float:
        """The machine's, now that a round lay so far beside the strategy's own factor. Of one that is hardly known most
        of it is the strategy's."""
        now, seen = self._machine.mean, self._strategies.get(name)
        known = seen.weight / (seen.weight + _YOUNG) if seen is not None else 0.0
        self._machine.tell(now + known * (beside - now), _BRIEF)
        return self._machine.mean

    def _common_part(self) -> float:
        return self._shared * self._common.mean

    def _log_factor(self, name: str, running: int) -> float:
        own = self._buckets.get((name, batch_bucket(running)))
        if own is not None:
            return own.mean
        seen = self._strategies.get(name)
        return seen.mean if seen is not None else self._common_part()
