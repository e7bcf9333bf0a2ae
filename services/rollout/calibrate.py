"""An engine times its own stages on requests made of random tokens, so that the selector begins with its real costs.

Rounds of all strategies at a few batch sizes and context lengths, as many as fit into a time budget: the ends of the
range come first, then what lies between, then all of it again. Nothing of it is left in the engine; its acceptance
means nothing and is told to nobody.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.core.protocols import Clock
from services.core.types import GroupWork, Prompt, SamplingParams
from services.rollout.native import NativeEngine
from services.speculation.adaptive import Adaptive
from services.speculation.cost_table import NETWORK, CostPoint
from services.speculation.round import Choice, RoundOutcome, RoundView
from services.speculation.strategy import OFF, DraftStrategy
from services.speculation.suffix_index import SuffixIndex

DUMMY = "calibration"  # prompt id of the random requests
_REPEATS = 2  # rounds per strategy that count, behind one that warms up
_SHORTEST, _LONGEST = 16, 512  # tokens of context


@dataclass(frozen=True)
class Limits:
    """What the engine can hold, and at which temperature its requests sample."""

    max_running: int
    max_len: int
    vocab_size: int
    temperature: float


@dataclass
class _Recorder:
    """A selector that does what it is told and keeps what it hears."""

    strategy: DraftStrategy = OFF
    heard: list[RoundOutcome] = field(default_factory=list)

    def choose(self, view: RoundView) -> Choice:
        return Choice(self.strategy, "calibration")

    def record(self, outcome: RoundOutcome) -> None:
        self.heard.append(outcome)


class _Session:
    """Dummy requests on an engine, strategy after strategy."""

    def __init__(self, engine: NativeEngine, limits: Limits, clock: Clock, budget_s: float) -> None:
        self._engine, self._limits, self._clock = engine, limits, clock
        self._end = clock() + budget_s
        self._recorder = _Recorder()
        self.found: dict[tuple[str, int, int], list[RoundOutcome]] = defaultdict(list)
        self.over = False

    def run(self, strategies: Sequence[DraftStrategy]) -> None:
        before = self._engine.use_selector(self._recorder)
        self._engine.feed_at_once(True)  # in portions, a drafter would not draft for most of these short rounds
        try:
            while not self.over:
                for running, context in _grid(self._limits):
                    self._engine.abort()
                    for strategy in strategies:
                        self._rounds(strategy, running, context)
        finally:
            self._engine.abort()
            self._engine.feed_at_once(False)
            self._engine.use_selector(before)

    def _rounds(self, strategy: DraftStrategy, running: int, context: int) -> None:
        """The first round warms up. It counts only as one in which the drafter caught up with a context."""
        self._recorder.strategy = strategy
        for repeat in range(1 + _REPEATS):
            if self.over:
                return
            if not self._engine.num_running:  # the first ones, or they ran into max_len
                self._engine.submit([_dummies(running, context, self._limits)])
            self._engine.step()
            heard = self._recorder.heard.pop()
            extends = strategy.drafter in NETWORK and heard.seconds.extend > 0
            caught_up = extends and heard.view.behind_tokens >= 8 * running
            if repeat or caught_up:
                self.found[strategy.name, heard.view.running, -context if caught_up else context].append(heard)
            self.over = bool(self.found) and self._clock() >= self._end


def measure_costs(
    engine: NativeEngine, strategies: Sequence[DraftStrategy], limits: Limits, clock: Clock, budget_s: float
) -> list[CostPoint]:
    """Measured rounds of an idle engine that has its weights, until the budget is spent; at least one, however slow the
    engine is. One point per strategy, batch size and context: the middle one of its rounds."""
    assert not engine.num_running and not engine.num_waiting, "calibrate an idle engine"
    session = _Session(engine, limits, clock, budget_s)
    session.run(strategies)
    middle = [sorted(f, key=lambda o: o.seconds.total)[(len(f) - 1) // 2] for f in session.found.values()]
    return [CostPoint(o.strategy, o.view, o.seconds) for o in middle]


def _grid(limits: Limits) -> Iterator[tuple[int, int]]:
    """(running, context) from the corners inwards."""
    most, longest = limits.max_running, max(2, min(_LONGEST, limits.max_len // 2))
    sizes = dict.fromkeys((1, most, *(s for s in (8, 32, 3, 128, 16) if s < most)))
    contexts = dict.fromkeys((min(_SHORTEST, longest), longest))
    corners = [(s, c) for s in list(sizes)[:2] for c in contexts]
    yield from corners
    yield from ((s, c) for c in contexts for s in sizes if (s, c) not in corners)


def _dummies(running: int, context: int, limits: Limits) -> GroupWork:
    rng = random.Random(f"{running}/{context}")
    ids = tuple(rng.randrange(limits.vocab_size) for _ in range(context))
    numbers = tuple(range(running))
    sampling = SamplingParams(temperature=limits.temperature, max_tokens=limits.max_len - context)
    return GroupWork(DUMMY, Prompt(DUMMY, "", ids, "", DUMMY), numbers, numbers, sampling)


class Calibration:
    """Runs once, as soon as the engine has all the weights that the strategies need; not for a selector that brought
    its measured costs along."""

    def __init__(
        self, selector: Adaptive, strategies: Sequence[DraftStrategy], limits: Limits, clock: Clock, budget_s: float
    ) -> None:
        self._selector, self._strategies, self._limits = selector, tuple(strategies), limits
        self._clock, self._budget_s = clock, budget_s
        self.done = budget_s == 0

    def run_when_ready(self, engine: NativeEngine, index: SuffixIndex | None) -> None:
        """Call it after a load. While requests run it waits for another time."""
        served = engine.versions
        drafts = any(s.drafter in NETWORK for s in self._strategies)
        missing = served.policy is None or (drafts and served.drafter is None)
        if self.done or self._selector.measured or missing or engine.num_running:
            return
        self.done = True
        points = measure_costs(engine, self._strategies, self._limits, self._clock, self._budget_s)
        if index is not None:
            index.forget(DUMMY)
        self._selector.calibrate(points)
