"""One long-tailed batch through an engine, watched from outside; and how long switching holds its requests up."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from services.core.protocols import Clock
from services.core.types import AcceptanceStats, GroupWork, Prompt, Rollout, SamplingParams, StrategySpan
from services.rollout.engine import RolloutEngine
from services.speculation.strategy import DraftStrategy

TAIL = 8  # running requests at most: the tail of a rollout
LOOK_S = 0.02
SETTLE, AFTER = 24, 12  # rounds before a switch, and behind it, that are looked at
LAG = 2  # rounds that were launched before a switch
ROUNDS_LIMIT_S = 60.0
EVERY_ROUND = ("\0",)  # a stop string that never comes: with one, news come after every round


def lognormal_lengths(count: int, longest: int, sigma: float) -> list[int]:
    """Quantiles of a log-normal distribution, scaled so that the last is `longest`: the same tail every time."""
    normal = NormalDist()
    factors = [math.exp(sigma * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    return [max(2, round(longest * f / factors[-1])) for f in factors]


def fitting(lengths: Sequence[int], natural: Sequence[int]) -> list[int]:
    """For each of `lengths`, the index of a prompt of its own, whose response is about as long by itself (`natural`):
    the shortest that is long enough, or the longest that is left. Behind its end a model writes what no drafter knows.
    """
    order, chosen = sorted(range(len(natural)), key=lambda i: natural[i]), [0] * len(lengths)
    left = [natural[i] for i in order]
    for at in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        found = min(bisect_left(left, lengths[at]), len(left) - 1)
        chosen[at] = order.pop(found)
        left.pop(found)
    return chosen


@dataclass(frozen=True)
class TailRun:
    """`timeline`: (seconds, unfinished requests, tokens so far). `tail_s`, `tail_tokens`: from the moment on when at
    most TAIL requests were unfinished. `spans`: what a selector chose, seconds counted from the start."""

    seconds: float
    tokens: int
    acceptance_length: float | None
    tail_s: float
    tail_tokens: int
    timeline: tuple[tuple[float, int, int], ...]
    steps_by_strategy: dict[str, int]
    spans: tuple[StrategySpan, ...]

    @property
    def tail_rate(self) -> float:
        """Tokens per second in the tail."""
        return self.tail_tokens / max(self.tail_s, 1e-9)


def run_tail(engine: RolloutEngine, work: Sequence[GroupWork], clock: Clock) -> TailRun:
    """All of `work` at once, to its end."""
    engine.take_spans()
    started = clock()
    engine.submit(work)
    finished: list[Rollout] = []
    timeline = [(0.0, sum(len(w.indices) for w in work), 0)]
    while engine.num_running or engine.num_waiting:
        finished += engine.step(LOOK_S)
        left = engine.num_running + engine.num_waiting
        timeline.append((clock() - started, left, engine.num_tokens + sum(len(r.response_ids) for r in finished)))
    spans = tuple(s.moved(-started) for s in engine.take_spans())
    stats = AcceptanceStats.merged(r.acceptance for r in finished)
    seconds, _, tokens = timeline[-1]
    began_s, _, before = next(point for point in timeline if point[1] <= TAIL)
    steps = dict(stats.steps_by_strategy)
    return TailRun(
        seconds, tokens, stats.acceptance_length, seconds - began_s, tokens - before, _thinned(timeline), steps, spans
    )


def _thinned(timeline: Sequence[tuple[float, int, int]], points: int = 200) -> tuple[tuple[float, int, int], ...]:
    stride = max(1, len(timeline) // points)
    return (*timeline[:-1:stride], timeline[-1])


@dataclass(frozen=True)
class SwitchStall:
    """Seconds between two rounds of one request: the usual ones with OFF and with a strategy, and those right behind
    each switch, `to_on` and `to_off`. `on_steps`, `off_steps`: what switching on and off cost altogether beyond the
    usual, in decode steps; up to LAG rounds may still be the old strategy's, which no switch can help."""

    off_round_s: float
    on_round_s: float
    to_on: tuple[float, ...]
    to_off: tuple[float, ...]

    @property
    def on_steps(self) -> float:
        return self._beyond(self.to_on, self.on_round_s, self.off_round_s)

    @property
    def off_steps(self) -> float:
        return self._beyond(self.to_off, self.off_round_s, self.on_round_s)

    def _beyond(self, gaps: Sequence[float], usual_s: float, old_s: float) -> float:
        expected = len(gaps) * usual_s + LAG * max(0.0, old_s - usual_s)
        return max(0.0, sum(gaps) - expected) / self.off_round_s


def switch_stall(
    engine: RolloutEngine,
    contexts: Sequence[Sequence[int]],
    switch: tuple[DraftStrategy, DraftStrategy],
    clock: Clock,
    settle: int = SETTLE,
    after: int = AFTER,
) -> SwitchStall:
    """Generation behind `contexts` under OFF, then with a strategy, then under OFF again. `switch`: OFF and the
    strategy; `settle`, `after`: rounds with either, and behind each switch, that are looked at."""
    off, strategy = switch
    longest = (settle + after) * (1 + strategy.num_draft_tokens) + 2 * LAG * strategy.num_draft_tokens
    sampling = SamplingParams(temperature=1.0, max_tokens=longest, stop_strings=EVERY_ROUND)
    engine.force_strategy(off)
    prompts = [Prompt(str(i), "", tuple(ids), "", "") for i, ids in enumerate(contexts)]
    engine.submit([GroupWork(f"stall.{i}", prompt, (0,), (i,), sampling) for i, prompt in enumerate(prompts)])
    watch = _Watch(engine, clock)
    watch.rounds(lambda: not engine.num_waiting)
    off_gaps = watch.gaps(settle)
    engine.force_strategy(strategy)
    to_on, on_gaps = watch.gaps(after), watch.gaps(settle)
    engine.force_strategy(off)
    to_off = watch.gaps(after)
    engine.force_strategy(None)
    engine.abort()
    return SwitchStall(median(off_gaps), median(on_gaps), tuple(to_on), tuple(to_off))


class _Watch:
    """The news of one request: it gets some with every round."""

    def __init__(self, engine: RolloutEngine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._known, self._at_s = 0, 0.0

    def rounds(self, done: Callable[[], bool]) -> None:
        until = self._clock() + ROUNDS_LIMIT_S
        while not done():
            self._engine.step(LOOK_S)
            assert self._clock() < until, f"nothing came for {ROUNDS_LIMIT_S} s"

    def gaps(self, count: int) -> list[float]:
        """Seconds between news, `count` of them; the first one counts from the last news before."""
        found = []
        for _ in range(count):
            before = self._at_s or self._next()
            found.append(self._next() - before)
        return found

    def _next(self) -> float:
        self.rounds(self._news)
        self._at_s = self._clock()
        return self._at_s

    def _news(self) -> bool:
        tokens = self._engine.running()[0].num_tokens
        known, self._known = self._known, tokens
        return tokens > known > 0 or (known == 0 and tokens > 0)
