"""A rollout server made of costs and laws: continuous batching in rounds, and the run's own selector. No device.

Between two changes of the batch every running request goes on by the strategy's expected tokens per round, so a
stretch of n rounds takes the table's seconds at its middle context, n times. A request ends with the round in which its
last token comes. What that leaves out: that requests differ in how well their drafts are accepted, and chance. What the
selector is told of a round is drawn (accepted drafts) and noisy (seconds), as an engine would tell it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import cast

from services.config.schema import ClusterConfig
from services.core.selector import SelectorState
from services.core.types import (
    AcceptanceStats,
    FinishReason,
    GroupWork,
    PartialRollout,
    Rollout,
    RunningRequest,
    ServedVersions,
    ServerReport,
)
from services.simulator.law import Law, expected_tokens, position_rates
from services.simulator.learning import Skill
from services.simulator.scenario import Scenario
from services.simulator.told import NOTHING, Told, Usage
from services.simulator.unseen import Unseen
from services.speculation.adaptive import Adaptive
from services.speculation.cost import CostModel
from services.speculation.cost_table import NETWORK, CostLine, CostTable
from services.speculation.round import Choice, RoundOutcome, RoundView, StageSeconds
from services.speculation.selector import Fixed, make_selector, restore_selector, selector_state
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

PLACE = "simulated"  # of a selector's state: all servers here are alike


@dataclass(slots=True)
class Request:
    """A rollout here. It came in at `joined` of the server's progress with `known` tokens of its response."""

    work: GroupWork
    index: int
    seed: int
    rollout_id: str
    length: int
    known: int
    started_s: float
    joined: float = 0.0
    used: Usage = NOTHING

    def reached(self, progress: float) -> int:
        """Tokens there are; its last one is still to come."""
        return min(self.length - 1, self.known + round(progress - self.joined))


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a round of one strategy at one batch size."""

    stages: CostLine
    base: float
    context: float
    behind: float

    def seconds(self, context: float, behind: float) -> float:
        return self.base + self.context * context + self.behind * behind


class Prices:
    """The table's lines, kept: all servers of a simulation share them."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._lines: dict[tuple[DraftStrategy, int], Line] = {}

    def line(self, strategy: DraftStrategy, running: int) -> Line:
        key = (strategy, running)
        if key not in self._lines:
            found = self._table.line(strategy, running)
            self._lines[key] = Line(found, found.base.total, found.context.total, found.behind)
        return self._lines[key]

    def stages(self, strategy: DraftStrategy, view: RoundView) -> StageSeconds:
        return self.line(strategy, view.running).stages.at(view)


def ids(count: int) -> tuple[int, ...]:
    """Token ids that nobody reads: only their number counts, and a range holds that without memory."""
    return cast("tuple[int, ...]", range(count))


class ServerModel:
    """Methods are those of a rollout server and answer with (answer, seconds it takes); `now` is the moment at which it
    begins."""

    def __init__(self, config: ClusterConfig, scenario: Scenario, prices: Prices, slot: int) -> None:
        self._scenario, self._slot = scenario, slot
        self._capacity = config.rollout.engine.max_running
        self._temperature = config.rollout.sampling.temperature
        self._rng = random.Random(f"{scenario.seed}/server/{slot}")
        self._selector = make_selector(config.speculation, random.Random(f"{scenario.seed}/selector/{slot}"))
        if isinstance(self._selector, Adaptive):
            self._selector.costs = CostModel(scenario.costs)  # what an engine measures at its start
        self._by_name = {s.name: s for s in (OFF, *(draft_strategy(c) for c in config.speculation.strategies))}
        self._learns = not isinstance(self._selector, Fixed)
        self._prices = prices
        self._policy: int | None = None
        self._drafter: int | None = None
        self._skill: Skill | None = None
        self._law: Law = scenario.learning.law(None, 0, -1)
        self._forced: DraftStrategy | None = None
        self._held: DraftStrategy | None = None  # chosen last
        self._epoch = -1
        self._clear()

    def _clear(self) -> None:
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[float, int, Request]] = []  # a heap by the progress at which they end
        self._progress, self._taken = 0.0, 0
        self._base = 0.0  # the context of what runs, less progress times their number
        self._unseen = Unseen()
        self._told = Told()

    # ------------------------------------------------------------------ leases, weights, strategies

    def open_epoch(self, epoch: int, now: float) -> tuple[ServedVersions, float]:
        assert epoch >= self._epoch, "leases grow"
        if epoch > self._epoch:
            self._clear()
        self._epoch = epoch
        return self._versions, 0.0

    def load_policy(self, version: int, now: float) -> tuple[ServedVersions, float]:
        self._policy = version
        self._new_law()
        return self._versions, self._scenario.seconds.load

    def load_drafter(self, version: int, skill: Skill, now: float) -> tuple[ServedVersions, float]:
        self._drafter, self._skill = version, skill
        self._new_law()
        return self._versions, self._scenario.seconds.load_drafter

    def set_strategy(self, name: str | None, now: float) -> tuple[None, float]:
        self._forced = None if name is None else self._by_name[name]
        return None, 0.0

    def selector_state(self, now: float) -> tuple[SelectorState | None, float]:
        return None if self._policy is None else selector_state(self._selector, PLACE), 0.0

    def restore_selector(self, state: SelectorState, now: float) -> tuple[bool, float]:
        return restore_selector(self._selector, state, PLACE), 0.0

    def _new_law(self) -> None:
        version = -1 if self._drafter is None else self._drafter
        self._law = self._scenario.learning.law(self._skill, self._policy or 0, version)

    @property
    def _versions(self) -> ServedVersions:
        return ServedVersions(self._policy, self._drafter)

    # ------------------------------------------------------------------ work

    def submit(self, works: Sequence[GroupWork], now: float) -> tuple[None, float]:
        for work in works:
            for index, seed in zip(work.indices, work.seeds, strict=True):
                begun = work.partial(index)
                length = self._scenario.lengths(work.group_id, work.prompt.id, index, seed)
                length = min(length, work.sampling.max_tokens)
                known = min(len(begun.response_ids), length - 1) if begun else 0
                started = begun.started_s if begun else now
                name = f"{work.group_id}#{index}"
                self._waiting.append(Request(work, index, seed, name, length, known, started))
        return None, 0.0

    def withdraw(self, rollout_ids: Sequence[str], now: float) -> tuple[tuple[PartialRollout, ...], float]:
        wanted = frozenset(rollout_ids)
        out = [(r, r.reached(self._progress)) for _, _, r in self._running if r.rollout_id in wanted]
        out += [(r, r.known) for r in self._waiting if r.rollout_id in wanted]
        partials = tuple(self._partial(r, count) for r, count in out)
        for _, number, request in self._running:
            if request.rollout_id in wanted:
                self._leaves(number, request)
        self._waiting = deque(r for r in self._waiting if r.rollout_id not in wanted)
        self._running = [entry for entry in self._running if entry[2].rollout_id not in wanted]
        heapq.heapify(self._running)
        return partials, 0.0

    def advance(self, budget_s: float, now: float) -> tuple[ServerReport, float]:
        self._told.begin()
        spent = 0.0
        while (self._waiting or self._running) and spent < budget_s:
            spent += self._admit()
            spent += self._stretch(budget_s - spent, spent)
            for request in self._ended():
                self._told.finished.append(self._rollout(request, now + spent))
        return self._report(spent), spent

    def submit_and_advance(self, works: Sequence[GroupWork], budget_s: float, now: float) -> tuple[ServerReport, float]:
        self.submit(works, now)
        return self.advance(budget_s, now)

    def _admit(self) -> float:
        """Take in what there is room for; seconds of its prefills. The rollouts of a prompt share one."""
        tokens, prompts = 0, set[str]()
        while self._waiting and self._fits():
            request = self._waiting.popleft()
            request.joined, request.used = self._progress, self._told.usage
            self._taken += 1
            end = self._progress + request.length - request.known
            heapq.heappush(self._running, (end, self._taken, request))
            base = self._part_of_base(request)
            self._base += base
            self._unseen.joined(base)
            if request.work.group_id not in prompts:
                prompts.add(request.work.group_id)
                tokens += len(request.work.prompt.token_ids)
            tokens += request.known
        seconds = tokens / self._scenario.prefill_rate
        self._told.prefilled(tokens, seconds)
        return seconds

    def _fits(self) -> bool:
        """Whether there is room for the next request, and in a dense block for those of its group behind it."""
        room = self._capacity - len(self._running)
        if not self._scenario.dense or room < 1:
            return room >= 1
        work = self._waiting[0].work
        return sum(1 for _ in takewhile(lambda r: r.work is work, self._waiting)) <= room

    # ------------------------------------------------------------------ rounds

    def _stretch(self, left_s: float, spent: float) -> float:
        """Rounds with one strategy, until a request ends, the budget does or the choice has stood long enough."""
        view = self._view()
        choice = self._choose(view)
        strategy, running, context = choice.strategy, view.running, self._read_by_a_pass(view)
        tokens, line = expected_tokens(strategy, self._law), self._prices.line(strategy, running)
        behind = running * tokens if strategy.drafter in NETWORK else 0.0  # of a drafter in use: one round's
        changed, self._held = strategy != self._held, strategy
        to_end = math.ceil((self._running[0][0] - self._progress) / tokens - 1e-9)
        in_time = math.ceil(left_s / max(line.seconds(context, behind), 1e-9))
        rounds = max(1, min(to_end, in_time, 1 if changed else self._scenario.stretch))  # a check is one round
        seconds = rounds * line.seconds(context + running * tokens * rounds / 2, behind)
        seconds += line.behind * max(0.0, view.behind_tokens - behind)
        self._progress += rounds * tokens
        if strategy.drafter in NETWORK:
            self._unseen.drafted(self._taken, self._progress - tokens)
        self._told.stretch(strategy, rounds, tokens, running, seconds, choice, spent)
        if self._learns:
            read = view if context == view.context_tokens else replace(view, context_tokens=context)
            stages = self._prices.stages(strategy, read)
            self._selector.record(self._outcome(strategy, view, tokens, stages))
        return seconds

    def _choose(self, view: RoundView) -> Choice:
        return self._selector.choose(view) if self._forced is None else Choice(self._forced, "forced")

    def _view(self) -> RoundView:
        running = len(self._running)
        context = round(self._base + running * self._progress)
        behind = min(context, round(self._unseen.tokens(running, self._progress)))
        return RoundView(running, context, behind, self._temperature, self._law.version)

    def _read_by_a_pass(self, view: RoundView) -> int:
        """Tokens of context."""
        if not self._scenario.dense:
            return view.context_tokens
        longest = max([self._part_of_base(request) for _, _, request in self._running])
        # Rounded up: never less than all contexts together, which a dense block holds.
        return view.running * math.ceil(longest + self._progress)

    def _outcome(self, strategy: DraftStrategy, view: RoundView, tokens: float, stages: StageSeconds) -> RoundOutcome:
        """One round of the stretch, as an engine tells it."""
        tried, accepted, reached = list[int](), list[int](), view.running
        for offered, rate in position_rates(strategy, self._law):
            tried.append(_binomial(self._rng, reached, offered))
            accepted.append(_binomial(self._rng, tried[-1], min(0.99, rate)))
            reached = accepted[-1]
        noise = math.exp(self._rng.gauss(0.0, self._scenario.noise))
        told = StageSeconds(stages.extend * noise, stages.draft * noise, stages.verify * noise, stages.rest * noise)
        return RoundOutcome(strategy, view, round(tokens * view.running), told, tuple(tried), tuple(accepted))

    def _ended(self) -> Iterator[Request]:
        while self._running and self._running[0][0] <= self._progress + 1e-9:
            _, number, request = heapq.heappop(self._running)
            self._leaves(number, request)
            yield request

    def _leaves(self, number: int, request: Request) -> None:
        base = self._part_of_base(request)
        self._base -= base
        self._unseen.left(number, base)

    # ------------------------------------------------------------------ what is told

    def _part_of_base(self, request: Request) -> float:
        return len(request.work.prompt.token_ids) + request.known - request.joined

    def _partial(self, request: Request, count: int) -> PartialRollout:
        versions = (self._policy or 0,), (self._drafter,) if self._drafter is not None else ()
        stats = self._told.usage.since(request.used) if count > request.known else AcceptanceStats()
        nothing = cast("tuple[float, ...]", ids(count))
        return PartialRollout(
            request.work.group_id, request.index, ids(count), nothing, *versions, stats, request.started_s
        )

    def _rollout(self, request: Request, now: float) -> Rollout:
        work, length = request.work, request.length
        reason = FinishReason.LENGTH if length >= work.sampling.max_tokens else FinishReason.STOP
        return Rollout(
            work.group_id, work.prompt.id, request.index, request.seed, work.prompt.token_ids, ids(length),
            cast("tuple[float, ...]", ids(length)), "", reason, work.sampling, (self._policy or 0,),
            (self._drafter,) if self._drafter is not None else (), self._told.usage.since(request.used),
            f"rollout-{self._slot}", request.started_s, now,
        )  # fmt: skip

    def _report(self, spent: float) -> ServerReport:
        told, shared = self._told, self._told.usage.since(NOTHING)
        progress = self._progress
        running = tuple([RunningRequest(r.rollout_id, r.reached(progress), shared) for _, _, r in self._running])
        return ServerReport(
            finished=tuple(told.finished),
            running=running,
            waiting=len(self._waiting),
            new_tokens=round(told.tokens),
            busy_s=spent,
            strategy=(self._held or OFF).name,
            versions=self._versions,
            prefill_tokens=told.prefill_tokens,
            prefill_s=told.prefill_s,
            spans=told.spans(-spent),
        )


def _binomial(rng: random.Random, count: int, rate: float) -> int:
    """Draws of `count` with this rate; many of them as their normal approximation."""
    if count * rate * (1 - rate) < 9:
        draw = rng.random
        return sum([draw() < rate for _ in range(count)]) if rate > 0 else 0
    spread = math.sqrt(count * rate * (1 - rate))
    return min(count, max(0, round(rng.gauss(count * rate, spread))))
