"""Predicted gain: lengths x acceptance x costs, before anything runs.

One server's rollout phase is replayed without chance. Groups come in as there is room; from one change of the batch to
the next, every request advances by the strategy's expected tokens per round, so a stretch takes

    seconds(strategy, view) * tokens advanced / tokens(strategy, view)

and the strategy with the least seconds per token is taken for it. The same replay with OFF alone is what the gain is
measured against. With expectations in place of draws this is exact for costs that are linear in context and batch;
three things are put in by hand:

- A response ends within a round. Of that round's t tokens (t - 1) / 2 are thrown away in the mean.
- A drafter's first round after OFF catches up with the whole context, and with the prompts that came in; in every other
  round it is one round behind.
- A stretch is cut at MOST_TOKENS, so that the choice follows the growing context.

Not in it: prefills, which are the same with and without drafts; what a selector loses by checking and by learning; that
requests whose drafts are accepted more often end earlier. The last two make the achieved gain smaller.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from services.core.gain import ExpectedGain, Workload
from services.speculation.cost_table import NETWORK
from services.speculation.expectation import committed, tree_rates
from services.speculation.round import RoundView, StageSeconds
from services.speculation.strategy import OFF, DraftStrategy

MOST_TOKENS = 256.0


class Costs(Protocol):
    def seconds(self, strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        """Expected wall seconds of a round."""


class Acceptance(Protocol):
    def tokens(self, strategy: DraftStrategy, view: RoundView) -> float:
        """Expected tokens that a request commits in a round, the bonus included."""


@runtime_checkable
class Predicts(Protocol):
    """A selector that decides by models of costs and acceptance."""

    @property
    def costs(self) -> Costs: ...

    @property
    def acceptance(self) -> Acceptance: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rounds with the same requests and strategy, in expectation. `tokens`: of all requests, what a stop cuts off
    included."""

    strategy: str
    running: int
    rounds: float
    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Replay:
    on: tuple[Stretch, ...]
    off: tuple[Stretch, ...]

    @property
    def gain(self) -> ExpectedGain:
        return ExpectedGain(sum(s.seconds for s in self.on), sum(s.seconds for s in self.off))


@dataclass(frozen=True)
class GivenAcceptance:
    """Acceptance as a person states it: `chain[k]` of position k + 1 given that those before were accepted; deeper
    positions are like the last one. Trees follow by the ranks' model of `expectation`."""

    chain: tuple[float, ...]

    def tokens(self, strategy: DraftStrategy, view: RoundView) -> float:
        if strategy.is_off:
            return 1.0
        depth = strategy.depth
        rates = tuple((self.chain + self.chain[-1:] * depth)[:depth])
        return committed(list(rates if strategy.topk == 1 else tree_rates(strategy.shape, rates).advance))


def predict(work: Workload, strategies: Sequence[DraftStrategy], costs: Costs, acceptance: Acceptance) -> Replay:
    """`strategies` and OFF, which always is one of them."""
    arms = tuple(dict.fromkeys((OFF, *strategies)))
    view = RoundView(1, 0, 0, work.temperature)
    tokens = {arm: acceptance.tokens(arm, view) for arm in arms}
    return Replay(_Drain(work, tokens, costs).run(), _Drain(work, {OFF: 1.0}, costs).run())


def deal(work: Workload, servers: int) -> list[Workload]:
    """The work of each of several servers that take groups in turn; servers without any are left out."""
    size, parts = work.group_size, list[Workload]()
    for first in range(min(servers, -(-len(work.lengths) // size))):
        starts = range(first * size, len(work.lengths), servers * size)
        lengths = tuple(n for start in starts for n in work.lengths[start : start + size])
        parts.append(Workload(lengths, size, work.prompt_tokens, work.capacity, work.temperature))
    return parts


@dataclass
class _Drain:
    """The replay of one server. Every running request is at `progress` tokens since the start; one that came in at p
    with n tokens to make ends at p + n."""

    work: Workload
    tokens: Mapping[DraftStrategy, float]
    costs: Costs
    progress: float = 0.0
    running: list[tuple[float, float]] = field(default_factory=list)  # a heap of (end, start)
    taken: int = 0  # rollouts that came in
    unseen: float = 0.0  # tokens that a drafter has not seen, beside one round's; infinite: all there are
    stretches: list[Stretch] = field(default_factory=list)

    def run(self) -> tuple[Stretch, ...]:
        self._admit()
        while self.running:
            self._advance()
            self._admit()
        return tuple(self.stretches)

    def _admit(self) -> None:
        """Whole groups, as there is room."""
        work = self.work
        while self.taken < len(work.lengths):
            group = work.lengths[self.taken : self.taken + work.group_size]
            if len(self.running) + len(group) > work.capacity:
                return
            for length in group:
                heapq.heappush(self.running, (self.progress + length, self.progress))
            self.taken += len(group)
            self.unseen += len(group) * work.prompt_tokens

    def _advance(self) -> None:
        """Up to the end of the next request, or MOST_TOKENS further."""
        count, context = len(self.running), self._context()
        arm = self._best(context)
        per_round = self.tokens[arm]
        wasted = (per_round - 1) / 2
        step = min(max(0.0, self.running[0][0] + wasted - self.progress), MOST_TOKENS)
        rounds = step / per_round
        seconds = self._catch_up(arm, context) + rounds * self._seconds(arm, context + count * step / 2)
        self.stretches.append(Stretch(arm.name, count, rounds, step * count, seconds))
        self.progress += step
        while self.running and self.running[0][0] + wasted <= self.progress + 1e-9:
            heapq.heappop(self.running)

    def _context(self) -> float:
        """Tokens of all running requests, prompts and responses."""
        return sum(self.progress - start + self.work.prompt_tokens for _, start in self.running)

    def _view(self, context: float, behind: float) -> RoundView:
        whole = round(context)
        return RoundView(len(self.running), whole, min(whole, round(behind)), self.work.temperature)

    def _seconds(self, arm: DraftStrategy, context: float) -> float:
        """Of a round whose drafter is one round behind."""
        return self.costs.seconds(arm, self._view(context, len(self.running) * self.tokens[arm])).total

    def _best(self, context: float) -> DraftStrategy:
        """The least seconds per token, with what must be caught up spread over the tokens that requests still make."""
        left = max(1.0, sum(end for end, _ in self.running) / len(self.running) - self.progress)

        def price(arm: DraftStrategy) -> float:
            return self._seconds(arm, context) / self.tokens[arm] + self._catching_up(arm, context) / left

        return min(self.tokens, key=price)

    def _catch_up(self, arm: DraftStrategy, context: float) -> float:
        """Seconds, once; without a network what the drafter has not seen grows to everything."""
        seconds = self._catching_up(arm, context)
        self.unseen = 0.0 if arm.drafter in NETWORK else math.inf
        return seconds

    def _catching_up(self, arm: DraftStrategy, context: float) -> float:
        """Seconds that the next round takes more than one whose drafter is a round behind."""
        unseen = min(self.unseen, context)
        if arm.drafter not in NETWORK or not unseen:
            return 0.0
        extend = [self.costs.seconds(arm, self._view(context, behind)).extend for behind in (unseen, 0.0)]
        return extend[0] - extend[1]
