"""What things cost, from recorded runs of one strategy each.

Rounds and the prefill rate (`lockstep`), the policy trainer's seconds (a + b per token that it learns from, neither
below zero, relative errors made small and their sum kept), the means of publishing and of waiting for rewards. A
colocated policy's memory switches lie within training and publishing, as recorded.

Assumed: a message takes no time (where the coordinator's answers hold up a server, rounds were recorded so much longer;
what a phase takes before and behind its servers' work is added to each); loading a policy is a part of publishing. What
a drafter has to catch up with at the beginning counts as prefill, which therefore has a rate for each strategy; from
round to round it cannot be told from drafting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from services.config.schema import ClusterConfig
from services.core.errors import DataError
from services.simulator.lockstep import (
    Beginning,
    Gap,
    Response,
    Rules,
    beginning,
    by_server,
    gaps,
    joined,
    lateness,
    lockstep,
    pooled,
)
from services.simulator.run_record import RecordedRun, RecordedStep
from services.simulator.scenario import Seconds
from services.speculation.cost_table import CostPoint, CostTable
from services.speculation.least_squares import nonnegative
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

# SGLang's news pass through two processes: on a quiet machine ends come some ms out of order, on a busy one up to 0.2 s
LEAST_LATE_S, SEEN_LATE_S = 0.03, 0.3
NOTHING = Seconds(**dict.fromkeys(("policy_token", "policy_step", "publish", "load", "load_drafter", "adopt", "merge",
                                   "estimate", "reward", "message", "turn"), 0.0))  # fmt: skip


@dataclass(frozen=True)
class Basis:
    """What recorded runs cost. `prefill`: tokens per second of a server by strategy; `around`: by who keeps hidden
    states (`drafter.states`), seconds of a rollout phase beside its servers' first starts and last ends; `points` from
    `used` servers' steps of `seen` (in each step every server is one)."""

    table: CostTable
    prefill: Mapping[str, float]
    around: Mapping[str, float]
    runs: tuple[RecordedRun, ...]
    points: tuple[CostPoint, ...]
    used: int
    seen: int

    def seconds_for(self, run: RecordedRun) -> Seconds:
        """Of everything but rounds, from the runs whose policy has as many GPUs, its own or shared ones. Raises
        DataError without one."""
        alike = [other for other in self.runs if policy_place(other.config) == policy_place(run.config)]
        if not alike:
            raise DataError(
                f"{run.name} trains its policy {policy_place(run.config)}, as no run of --from does: name one of mode "
                "off or static there that does, for the policy's seconds"
            )
        return seconds_of(alike)

    def check_drafters(self, run: RecordedRun) -> None:
        """Raises DataError for a run that drafted in a way whose costs were not seen."""
        names = {name for r in run.responses for name in r.steps_by_strategy}
        used = {s.drafter for s in map(draft_strategy, run.config.speculation.strategies) if s.name in names}
        unseen = sorted(used - {point.strategy.drafter for point in self.points} - {OFF.drafter})
        if unseen:
            raise DataError(
                f"{run.name} drafts with {' and '.join(unseen)}, of which no run of --from tells the costs: name one "
                "of mode static there"
            )

    def around_s(self, run: RecordedRun) -> float:
        """Of a run whose states are kept elsewhere: the mean."""
        own = self.around.get(run.config.drafter.states)
        return own if own is not None else mean(self.around.values())

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
    engine = config.rollout.engine
    if engine.type == "native":
        return Rules(engine.max_running, dense=True)
    return Rules(engine.max_running, SEEN_LATE_S, LEAST_LATE_S)


def policy_place(config: ClusterConfig) -> str:
    place = config.placement
    return f"{place.policy} in {place.policy_workers} worker{'s' if place.policy_workers > 1 else ''}"


def check_alike(runs: Sequence[RecordedRun]) -> None:
    """Raises DataError unless these ran on one engine and kind of model. Whether models of two folders are of one shape
    nobody can see here."""
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
    found = {f"model.{name}": value for name, value in config.model.model_dump(exclude={"path"}).items()}
    return found | {f"rollout.engine.{name}": value for name, value in engine.items()}


def basis_of(runs: Sequence[RecordedRun]) -> Basis:
    """Raises DataError when a run has several strategies, or when nothing of all of them is in lockstep."""
    found, starts, seen = dict[DraftStrategy, list[Gap]](), list[tuple[DraftStrategy, Beginning]](), 0
    for run in runs:
        strategy, rules = _only_strategy(run), rules_of(run.config)
        seen += sum(1 for step in run.counted for _ in by_server(step.responses))
        for own in _in_lockstep(run):
            found.setdefault(strategy, []).extend(joined(gaps(own, rules), max(rules.least_late_s, lateness(own))))
            starts.append((strategy, beginning(own, rules)))
    points = [gap.point(strategy) for strategy, own in found.items() for gap in pooled(own)]
    if not points:
        raise DataError(_no_points(runs, bool(starts)))
    table = _fitted(points, starts)
    return Basis(table, _prefill(starts, table), _around(runs), tuple(runs), tuple(points), len(starts), seen)


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


def _around(runs: Sequence[RecordedRun]) -> dict[str, float]:
    """Medians: orders and reports on their way, and handing over the states that engines kept."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for step in run.counted:
            found.setdefault(run.config.drafter.states, []).append(max(0.0, step.metrics.rollout_s - _span_s(step)))
    return {states: median(seconds) for states, seconds in found.items()}


def _span_s(step: RecordedStep) -> float:
    """Of the server that took longest, from its first start to its last end."""
    return max(max(r.finished_s for r in own) - min(r.started_s for r in own) for own in by_server(step.responses))


def seconds_of(runs: Sequence[RecordedRun]) -> Seconds:
    """Of everything but rounds and the drafter's training."""
    steps = [step for run in runs for step in run.counted]
    trained = [(step.metrics.policy_s, step.tokens(run.of_flat)) for run in runs for step in run.counted]
    rows = [(1 / policy_s, tokens / policy_s) for policy_s, tokens in trained if policy_s > 0]
    a, b = nonnegative(rows, [1.0] * len(rows)) if rows else (0.0, 0.0)
    # Steps that were slow by chance have small relative errors: alone, these would make all steps too quick.
    fitted = sum(a + b * tokens for _, tokens in trained)
    kept = sum(policy_s for policy_s, _ in trained) / fitted if fitted else 0.0
    publish = mean(step.metrics.publish_s for step in steps)
    reward = mean(step.metrics.reward_s for step in steps)
    return replace(NOTHING, policy_step=kept * a, policy_token=kept * b, publish=publish, reward=reward)
