"""From recorded runs to what a simulation assumes, and the simulation of a recorded run.

Read from runs of one strategy each: what rounds cost and the prefill rate (`lockstep`), the policy trainer's seconds
(a + b per token that it learns from, neither below zero, relative errors made small), the medians of publishing and of
waiting for rewards. A colocated policy's memory switches lie within training and publishing, as recorded. Read from the
run that is to be predicted, like its lengths and prompts: which groups had a signal to learn from, how often drafts
were accepted by position, and, where its drafter was trained, the seconds of a micro-step (all slot seconds of drafting
over their micro-steps, so with adopting and merging states) and what loading a drafter added to publishing.

Assumed: a message takes no time (where the coordinator's answers hold up a server, rounds were recorded so much
longer); loading a policy is a part of publishing; an estimate of acceptance takes no time. What a drafter has to catch
up with at the beginning counts as prefill, which therefore has a rate for each strategy; from round to round it cannot
be told from drafting.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from statistics import mean, median
from typing import Any

from services.config.schema import ClusterConfig
from services.coordinator.work import in_passes
from services.core.errors import DataError
from services.core.types import AcceptanceStats, Prompt, StepMetrics
from services.simulator.law import Law, position_rates
from services.simulator.learning import POSITIONS, GivenAcceptance
from services.simulator.lockstep import (
    Beginning,
    Gap,
    Response,
    Rules,
    beginning,
    by_server,
    gaps,
    joined,
    lockstep,
    pooled,
)
from services.simulator.run_record import RecordedRun
from services.simulator.scenario import Recorded, Scenario, Seconds
from services.simulator.world import simulate
from services.speculation.cost_table import LOOK_UP, CostPoint, CostTable
from services.speculation.least_squares import nonnegative
from services.speculation.strategy import DraftStrategy, draft_strategy

SEEN_LATE_S = 0.1  # SGLang tells of an end when it is asked, and streams in pieces
LOOKED_UP = 0.05  # of a run's verify steps: so many may be look-ups, whose acceptance is not known by position
NOTHING = Seconds(**dict.fromkeys(("policy_token", "policy_step", "publish", "load", "load_drafter", "adopt", "merge",
                                   "estimate", "reward", "message", "turn"), 0.0))  # fmt: skip


@dataclass(frozen=True)
class Basis:
    """What recorded runs cost. `prefill`: tokens per second of a server by strategy; `points` from `used` servers'
    steps of `seen` (in each step every server is one)."""

    table: CostTable
    prefill: Mapping[str, float]
    seconds: Seconds
    points: tuple[CostPoint, ...]
    used: int
    seen: int

    @property
    def most(self) -> int:
        """Requests at once, of what was seen."""
        return max(point.view.running for point in self.points)

    def prefill_rate(self, run: RecordedRun) -> float:
        """Of a run that drafts otherwise: with the mean seconds of all."""
        own = self.prefill.get(run.mode)
        per_token = [1 / rate for rate in ([own] if own is not None else self.prefill.values())]
        return 1 / mean(per_token) if any(per_token) else math.inf


def most_at_once(run: RecordedRun) -> int:
    """Requests that a server had in a step, as many as fit."""
    most = max(len(own) for step in run.steps for own in by_server(step.responses))
    return min(most, run.config.rollout.engine.max_running)


def rules_of(config: ClusterConfig) -> Rules:
    native = config.rollout.engine.type == "native"
    return Rules(config.rollout.engine.max_running, 0.0 if native else SEEN_LATE_S, native)


def check_alike(runs: Sequence[RecordedRun]) -> None:
    """Raises DataError unless these ran on one model, engine and place of the policy."""
    for run in runs[1:]:
        one, other = _kind(runs[0].config), _kind(run.config)
        unlike = [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
        if unlike:
            name = unlike[0]
            raise DataError(
                f"{run.name} has {name} {other.get(name)}, {runs[0].name} has {one.get(name)}: seconds of one say "
                "nothing about the other; name runs that differ in servers, strategies and lengths alone"
            )


def _kind(config: ClusterConfig) -> dict[str, Any]:
    """What the costs are costs of."""
    engine = config.rollout.engine.model_dump(exclude={"max_running", "max_len", "capture_bytes"})
    found = {f"model.{name}": value for name, value in config.model.model_dump().items()}
    found |= {f"rollout.engine.{name}": value for name, value in engine.items()}
    for name in ("policy", "policy_workers"):
        found[f"placement.{name}"] = getattr(config.placement, name)
    return found


def basis_of(runs: Sequence[RecordedRun]) -> Basis:
    """Raises DataError when a run has several strategies, or when nothing of all of them is in lockstep."""
    found, starts, seen = dict[DraftStrategy, list[Gap]](), list[tuple[DraftStrategy, Beginning]](), 0
    for run in runs:
        strategy, rules = _only_strategy(run), rules_of(run.config)
        seen += sum(1 for step in run.counted for _ in by_server(step.responses))
        for own in _in_lockstep(run):
            found.setdefault(strategy, []).extend(joined(gaps(own, rules), rules.late_s))
            starts.append((strategy, beginning(own, rules)))
    points = [gap.point(strategy) for strategy, own in found.items() for gap in pooled(own)]
    if not points:
        raise DataError(_no_points(runs, bool(starts)))
    table = _fitted(points, starts)
    return Basis(table, _prefill(starts, table), seconds_of(runs), tuple(points), len(starts), seen)


def _in_lockstep(run: RecordedRun) -> Iterator[tuple[Response, ...]]:
    """What servers did in a step, of those whose rollouts all went on together."""
    for step in run.counted:
        if not step.disturbed:
            yield from (own for own in by_server(step.responses) if lockstep(own, rules_of(run.config)))


def cost_error(run: RecordedRun, basis: Basis) -> float | None:
    """By how much its rounds between ends, as many and as large as they were, would cost more than they took: the part
    of a prediction's error that no simulation can mend. None: of a run that chose its strategies, or has no lockstep.
    """
    if run.strategy is None:
        return None
    parts = [gap for own in _in_lockstep(run) for gap in gaps(own, rules_of(run.config))]
    took = sum(gap.seconds for gap in parts)
    costs = sum(gap.rounds * basis.table.seconds(run.strategy, gap.view).total for gap in parts)
    return costs / took - 1 if took > 0 else None


def _fitted(points: Sequence[CostPoint], starts: Sequence[tuple[DraftStrategy, Beginning]]) -> CostTable:
    """Full batches run until the first end only, so that their costs continue a line. Where it rises beyond what was
    recorded there, with the prefill, that counts as measured too."""
    table, longest = CostTable.fit(points), list[CostPoint]()
    for strategy in dict.fromkeys(strategy for strategy, _ in starts):
        own = pooled(start.rounds for other, start in starts if other == strategy)
        longest += [gap.point(strategy) for gap in own]
    beyond = [p for p in longest if table.seconds(p.strategy, p.view).total > p.total]
    return CostTable.fit([*points, *beyond]) if beyond else table


def _only_strategy(run: RecordedRun) -> DraftStrategy:
    if run.strategy is None:
        raise DataError(
            f"{run.name} chose its strategies ({run.mode}), so its rounds have no one cost: give it to --runs, and "
            "runs of mode off or static to --from"
        )
    return run.strategy


def _no_points(runs: Sequence[RecordedRun], any_in_lockstep: bool) -> str:
    names = ", ".join(run.name for run in runs)
    if any_in_lockstep:
        return f"the rollouts of {names} are too short or too alike to tell rounds apart: record longer responses"
    most = max(len(own) for run in runs for step in run.counted for own in by_server(step.responses))
    return (
        f"in no step of {names} did all rollouts of a server run together: record a run with "
        f"rollout.engine.max_running of at least {most} and without rollout.consolidate"
    )


def _prefill(starts: Sequence[tuple[DraftStrategy, Beginning]], table: CostTable) -> dict[str, float]:
    """Where rounds alone take longer than was recorded, prefill takes nothing that could be seen."""
    found = dict[str, float]()
    for strategy in dict.fromkeys(strategy for strategy, _ in starts):
        own = [start for other, start in starts if other == strategy]
        seconds = sum(start.prefill_s(strategy, table) for start in own)
        found[strategy.name] = sum(start.tokens for start in own) / seconds if seconds > 0 else math.inf
    return found


def seconds_of(runs: Sequence[RecordedRun]) -> Seconds:
    """Of everything but rounds and the drafter's training."""
    steps = [step for run in runs for step in run.counted]
    trained = [(step.metrics.policy_s, step.tokens(run.of_flat)) for run in runs for step in run.counted]
    rows = [(1 / policy_s, tokens / policy_s) for policy_s, tokens in trained if policy_s > 0]
    a, b = nonnegative(rows, [1.0] * len(rows)) if rows else (0.0, 0.0)
    publish = median(step.metrics.publish_s for step in steps)
    reward = median(step.metrics.reward_s for step in steps)
    return replace(NOTHING, policy_step=a, policy_token=b, publish=publish, reward=reward)


def with_drafter(seconds: Seconds, run: RecordedRun) -> Seconds:
    """With the drafter's, as far as the run trained one."""
    steps = [step.metrics for step in run.steps]
    micro_steps, drafting_s = sum(m.drafter_micro_steps for m in steps), sum(m.drafting_s for m in steps)
    if micro_steps:
        seconds = replace(seconds, micro_step=drafting_s / micro_steps)
    return replace(seconds, load_drafter=_load_drafter_s(steps))


def _load_drafter_s(steps: Sequence[StepMetrics]) -> float:
    """How much longer publishing took where a drafter came along."""
    loads: dict[bool, list[float]] = {True: [], False: []}
    for before, after in pairwise(steps):
        loads[after.drafter_version != before.drafter_version].append(after.publish_s)
    return max(0.0, median(loads[True]) - median(loads[False])) if loads[True] and loads[False] else 0.0


# ---------------------------------------------------------------------------- acceptance


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


# ---------------------------------------------------------------------------- the simulation


def predicted(run: RecordedRun, basis: Basis) -> list[StepMetrics]:
    """The run again, on what `basis` says that things cost. Raises DataError when it cannot be simulated."""
    known = {(r.group_id, r.index): r.tokens for r in run.responses}
    scenario = Scenario(
        basis.table,
        Recorded(known),
        GivenAcceptance(chain=acceptance_of(run) or (0.0,)),
        with_drafter(basis.seconds, run),
        prefill_rate=basis.prefill_rate(run),
        dense=rules_of(run.config).dense,
        prompts=prompts_of(run),
        trained={step.metrics.step: step.tokens(run.of_flat) for step in run.steps},
    )
    return list(simulate(simulated_config(run), scenario, lambda: 0.0).steps)


def simulated_config(run: RecordedRun) -> ClusterConfig:
    """The run's own, but for what a simulation does without: engines that keep states, a policy on the slots' GPUs
    (whose turns are within the recorded seconds), evaluations, checkpoints, dynamic sampling."""
    tree = run.config.model_dump()
    tree["drafter"]["states"] = "policy"
    tree["placement"]["policy"] = "split"
    tree["policy"]["algorithm"]["dynamic_sampling"] = None
    tree["run"] |= {
        "steps": len(run.steps),
        "eval_prompts": 0,
        "compare_prompts": 0,
        "checkpoint_every": 0,
        "checkpoint_url": None,
    }
    return ClusterConfig.model_validate(tree)


def prompts_of(run: RecordedRun) -> dict[str, int]:
    """Their tokens, so arranged that the coordinator draws for each group its own; named by the groups."""
    per_step = run.config.rollout.prompts_per_step
    drawn = list[tuple[str, int]]()
    for step in run.steps:
        groups = sorted({r.group_id: r.prompt_tokens for r in step.responses}.items(), key=_position)
        if len(groups) != per_step:
            raise DataError(
                f"{run.name} has {len(groups)} groups in step {step.metrics.step} and not rollout.prompts_per_step "
                f"({per_step}): further prompts of dynamic sampling are not simulated; record a run without "
                "policy.algorithm.dynamic_sampling"
            )
        drawn += groups
    places = islice(in_passes(_numbered(len(drawn)), 0, str(run.config.run.seed)), len(drawn))
    arranged = {int(place.id): group for place, group in zip(places, drawn, strict=True)}
    return dict(arranged[i] for i in range(len(drawn)))


def _position(group: tuple[str, int]) -> int:
    return int(group[0].rpartition("/")[2])


def _numbered(count: int) -> Sequence[Prompt]:
    return [Prompt(str(i), "", (), "", "") for i in range(count)]
