"""A rollout engine made of recorded costs: requests with lengths, acceptance by law, rounds with prices. No device.

What a selector sees of it are RoundViews and RoundOutcomes, as from an engine: accepted drafts are drawn, seconds are
noisy (4 % and now and then a round of a multiple). The replay itself counts each round at its mean price, and knows the
tokens that it was expected to bring, so that its tokens per second compare decisions and not luck.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.config.speculation import StrategyConfig
from services.simulator.law import Law, position_rates
from services.speculation.cost import batch_bucket
from services.speculation.cost_table import CostPoint, CostTable
from services.speculation.expectation import committed
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.strategy import DraftStrategy, draft_strategy

COSTS = Path(__file__).parent / "costs"
NOISE, OUTLIERS, OUTLIER_FACTOR = 0.04, 0.01, (1.5, 4.0)
BUMP = 0.05  # how far prices of a strategy in a batch bucket lie beside the smooth table, either way


@dataclass(frozen=True)
class Recorded:
    """Prices as measured: a smooth table through the points."""

    name: str
    points: tuple[CostPoint, ...]
    table: CostTable


def read_costs(name: str, folder: Path = COSTS) -> Recorded:
    tree = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    points = tuple(cost_point(p) for p in tree["points"])
    fitted = CostTable.fit(points)
    terms = {**fitted.terms, **tree.get("assumed", {})}
    return Recorded(name, points, CostTable(terms, fitted.knots, fitted.spread))


def cost_point(tree: Mapping[str, Any]) -> CostPoint:
    strategy = draft_strategy(StrategyConfig(**tree["strategy"]))
    seconds = tree["seconds"]
    stages = StageSeconds(**seconds) if isinstance(seconds, dict) else float(seconds)
    return CostPoint(strategy, RoundView(tree["running"], tree["context_tokens"], tree["behind_tokens"]), stages)


@dataclass(frozen=True)
class Prices:
    """What rounds cost on average: the table, with bumps that no formula has."""

    table: CostTable
    seed: int
    lines: dict[Any, Any] = field(default_factory=dict, compare=False)

    def seconds(self, strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        key = (strategy, view.running)
        if key not in self.lines:
            off = random.Random(f"{self.seed}/{strategy.name}/{batch_bucket(view.running)}").uniform(-BUMP, BUMP)
            self.lines[key] = self.table.line(*key), math.exp(off)
        line, bump = self.lines[key]
        plain = line.at(view)
        return StageSeconds(plain.extend, plain.draft * bump, plain.verify * bump, plain.rest * bump)


@dataclass(slots=True)
class Running:
    """A request. `luck` scales its acceptance; `drafted`: tokens that the drafter has seen."""

    prompt: int
    length: int
    luck: float
    done: int = 0
    drafted: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.done


@dataclass(frozen=True)
class Step:
    """Requests that start together, under a law that may depend on the share of them that ended; `refill`: the same
    number runs until all have had their turn."""

    lengths: tuple[int, ...]
    law: Callable[[float], Law]
    prompt: int = 160
    refill: int | None = None


@dataclass(frozen=True)
class Round:
    """One round of a replay. `tokens` were drawn, `expected` is their mean before; `seconds` and `off_seconds`: mean
    prices of what was chosen and of OFF."""

    running: int
    strategy: str
    tokens: int
    expected: float
    seconds: float
    off_seconds: float


class Replay:
    """Runs the steps of a trace with one selector."""

    def __init__(self, prices: Prices, steps: Sequence[Step], off: DraftStrategy, seed: int) -> None:
        self._prices, self._steps, self._off = prices, steps, off
        self._rng, self._luck = random.Random(seed), random.Random(f"{seed}/luck")
        self._running: list[Running] = []
        self.law = steps[0].law(0.0)
        self.rounds: list[Round] = []
        self._expected: dict[tuple[str, Law, int, int], float] = {}
        self._ended = 0  # with the number that runs it tells which do

    def run(self, choose: Callable[[RoundView], DraftStrategy], record: Callable[[RoundOutcome], None]) -> None:
        for step in self._steps:
            waiting = [self._begin(step, length) for length in step.lengths]
            most = step.refill or len(waiting)
            while waiting or self._running:
                while waiting and len(self._running) < most:
                    self._running.append(waiting.pop())
                self.law = step.law(1 - (len(waiting) + len(self._running)) / len(step.lengths))
                self._round(choose, record)

    def _begin(self, step: Step, length: int) -> Running:
        return Running(step.prompt, length, self._luck.uniform(0.85, 1.1))

    def view(self) -> RoundView:
        known = sum(r.known for r in self._running)
        behind = known - sum(r.drafted for r in self._running)
        return RoundView(len(self._running), known, behind, 1.0, self.law.version)

    def _round(self, choose: Callable[[RoundView], DraftStrategy], record: Callable[[RoundOutcome], None]) -> None:
        view = self.view()
        strategy = choose(view)
        mean, expected = self._prices.seconds(strategy, view), view.running * self.expected_tokens(strategy)
        tokens, tried, accepted = self._commit(strategy)
        off = self._prices.seconds(self._off, view).total
        self.rounds.append(Round(view.running, strategy.name, tokens, expected, mean.total, off))
        noise = math.exp(self._rng.gauss(0.0, NOISE))
        if self._rng.random() < OUTLIERS:
            noise *= self._rng.uniform(*OUTLIER_FACTOR)
        told = StageSeconds(*(s * noise for s in (mean.extend, mean.draft, mean.verify, mean.rest)))
        cut = view.running + sum(accepted) - tokens
        record(RoundOutcome(strategy, view, tokens, told, tuple(tried), tuple(accepted), cut))

    def _commit(self, strategy: DraftStrategy) -> tuple[int, list[int], list[int]]:
        rates = position_rates(strategy, self.law)
        tried, accepted, total = [0] * len(rates), [0] * len(rates), 0
        for request in self._running:
            reached = self._accepted(rates, request.luck, tried, accepted)
            new = min(reached + 1, request.length - request.done)
            if strategy.drafter == "eagle":
                request.drafted = request.known
            request.done += new
            total += new
        left = [r for r in self._running if r.done < r.length]
        self._ended += len(self._running) - len(left)
        self._running = left
        return total, tried, accepted

    def _accepted(
        self, rates: Sequence[tuple[float, float]], luck: float, tried: list[int], accepted: list[int]
    ) -> int:
        draw = self._rng.random
        for k, (offered, rate) in enumerate(rates):
            if offered < 1 and draw() >= offered:
                return k
            tried[k] += 1
            if draw() >= min(0.99, rate * luck):
                return k
            accepted[k] += 1
        return len(rates)

    def expected_tokens(self, strategy: DraftStrategy) -> float:
        """Per request, of those that run: the truth."""
        key = (strategy.name, self.law, len(self._running), self._ended)
        if key not in self._expected:
            rates = position_rates(strategy, self.law)
            found = [committed([o * min(0.99, r * q.luck) for o, r in rates]) for q in self._running]
            self._expected[key] = sum(found) / len(found)
        return self._expected[key]

    def expected_seconds(self, strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        return self._prices.seconds(strategy, view)

    def remaining_tokens(self) -> float:
        """Per request, of those that run: the truth."""
        return sum(r.length - r.done for r in self._running) / len(self._running)
