"""`longtail bench simulator`: the simulator's step times against those of runs with real services.

Real services run side by side on time lines of their own in processor time (`side_by_side`), so that other work and the
number of cores do not count. The simulation gets what a person would have beforehand or from one small run: a cost
table measured apart, seconds per token of policy training and prefill from the run with one server and OFF. Processor
time is not the same from minute to minute where others use the machine, so the table is measured before and after the
runs of each mode, which stand between; how far the two lie apart is told beside the errors (`cost_drift`). Given to it
are also each run's response lengths and, where drafts are made, how often they were accepted by position. So it is the
costs, the batching and the coordinator's decisions that are checked, not the guesses about lengths and acceptance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from deploy.bench_costs import measured
from deploy.inputs import load_inputs
from deploy.local import build_services
from deploy.modes import NEVER, in_mode
from deploy.provenance import provenance
from deploy.side_by_side import SideBySideHost, single_threaded
from deploy.simulator_table import HEAD, by_run, compared, summary, table
from services.config.schema import ClusterConfig
from services.config.speculation import eagle_chain
from services.coordinator.coordinator import Coordinator
from services.coordinator.services import Inputs
from services.coordinator.telemetry.facts import NoTelemetry
from services.core.types import AcceptanceStats, Group, Rollout, ServerReport, StepMetrics
from services.simulator.learning import GivenAcceptance
from services.simulator.scenario import Recorded, Scenario, Seconds
from services.simulator.world import Notes, simulate
from services.speculation.cost_table import CostPoint, CostTable
from services.speculation.strategy import OFF, draft_strategy

MODES = ("off", "static", "full")
STATIC = eagle_chain(2)


@dataclass
class _Notes(Notes):
    """With the rollouts."""

    generated: list[Rollout] = field(default_factory=list)

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        self.generated += [r for g in groups for r in g.rollouts]


@dataclass
class _Prefills(NoTelemetry):
    tokens: int = 0
    seconds: float = 0.0

    def reported(self, slot: int, report: ServerReport) -> None:
        self.tokens += report.prefill_tokens
        self.seconds += report.prefill_s


@dataclass(frozen=True)
class Measured:
    config: ClusterConfig
    mode: str
    inputs: Inputs
    steps: tuple[StepMetrics, ...]
    rollouts: tuple[Rollout, ...]
    prefill_rate: float


def measure(config: ClusterConfig, mode: str, servers: int) -> Measured:
    sized = _still(in_mode(config, mode, STATIC), servers)
    notes, prefills, host = _Notes(), _Prefills(), SideBySideHost()
    inputs = load_inputs(sized)
    with ExitStack() as closing:
        services = build_services(sized, host, closing, time.process_time)
        Coordinator(sized, inputs, services, notes, host.clock, telemetry=prefills).run()
    rate = prefills.tokens / prefills.seconds
    return Measured(sized, mode, inputs, tuple(notes.steps), tuple(notes.generated), rate)


def _still(config: ClusterConfig, servers: int) -> ClusterConfig:
    """So many servers; the drafter is not trained, so that its acceptance is one number per position. A simulation has
    no engine that keeps states."""
    tree = config.model_dump()
    tree["rollout"]["num_servers"] = servers
    tree["drafter"]["training"] |= NEVER
    tree["drafter"]["states"] = "policy"
    tree["run"] |= {"eval_prompts": 0, "compare_prompts": 0, "checkpoint_every": 0}
    return ClusterConfig.model_validate(tree)


def by_position(rollouts: Sequence[Rollout]) -> tuple[float, ...]:
    """How often drafts of a chain were accepted, given those before."""
    histogram = AcceptanceStats.merged(r.acceptance for r in rollouts).histogram
    reached = [sum(histogram[k:]) for k in range(len(histogram))]
    return tuple(after / before for before, after in pairwise(reached) if before)


def seconds_of(reference: Measured) -> Seconds:
    """From the run with one server and OFF."""
    tokens = [sum(len(r.prompt_ids) + len(r.response_ids) for r in rs) for rs in _by_step(reference)]
    rate = median(m.policy_s / n for m, n in zip(reference.steps, tokens, strict=True))
    publish_s = median(m.publish_s for m in reference.steps)
    nothing = dict.fromkeys(("load", "load_drafter", "adopt", "estimate", "reward", "message", "turn"), 0.0)
    return Seconds(policy_token=rate, policy_step=0.0, publish=publish_s, **nothing)


def _by_step(run: Measured) -> list[list[Rollout]]:
    found: dict[str, list[Rollout]] = {}
    for rollout in run.rollouts:
        found.setdefault(rollout.group_id.partition("/")[0], []).append(rollout)
    return list(found.values())


def predict(run: Measured, reference: Measured, costs: CostTable, chain: tuple[float, ...]) -> list[StepMetrics]:
    known = {(r.group_id, r.index): len(r.response_ids) for r in run.rollouts}
    prompts = {p.id: len(p.token_ids) for p in run.inputs.train}
    scenario = Scenario(
        costs, Recorded(known), GivenAcceptance(chain=chain or (0.0,)), seconds_of(reference),
        prefill_rate=reference.prefill_rate, prompts=prompts, dense=run.config.rollout.engine.type == "native",
    )  # fmt: skip
    return list(simulate(run.config, scenario, lambda: 0.0).steps)


def run_bench(
    config: ClusterConfig, servers: Sequence[int] = (1, 2, 4), seconds: float = 30.0, say: Callable[[str], None] = print
) -> dict[str, Any]:
    config = single_threaded(_chains_only(config))
    share = seconds / (1 + len(MODES))
    looks = [_look(config, share)]
    reference = measure(config, "off", 1)
    rows = list[dict[str, Any]]()
    chain: tuple[float, ...] = ()
    say(HEAD)
    for mode in MODES:
        found = [reference if (mode, n) == ("off", 1) else measure(config, mode, n) for n in servers]
        looks.append(_look(config, share))
        costs = CostTable.fit([*looks[-2], *looks[-1]])
        for count, run in zip(servers, found, strict=True):
            chain = by_position(run.rollouts) if mode == "static" else chain
            rows += compared(run.mode, count, run.steps, predict(run, reference, costs, chain), say)
    runs, drift = by_run(rows), drift_of(looks)
    say(table(runs))
    say(f"OFF before and after a mode's runs differs by up to {drift:.1%} in the tables: so much the machine moves")
    return {
        "bench": "simulator",
        **provenance(),
        **summary(rows),
        "cost_spread": round(costs.spread, 4),
        "cost_drift": round(drift, 4),
        "runs": runs,
        "rows": rows,
    }


def _look(config: ClusterConfig, seconds: float) -> list[CostPoint]:
    engine = config.rollout.engine
    arms = [OFF, *(draft_strategy(s) for s in dict.fromkeys((*config.speculation.strategies, STATIC)))]
    arms = [a for a in dict.fromkeys(arms) if a.drafter in ("off", "eagle")]
    return measured(config, arms, engine.max_running, engine.max_len, seconds)


def drift_of(looks: Sequence[Sequence[CostPoint]]) -> float:
    """How far the machine itself moved: of the costs of OFF in two successive measurements, the largest relative
    difference (the median over the batches and contexts that were looked at)."""
    views = [p.view for p in looks[0] if p.strategy.is_off]
    tables = [CostTable.fit(look) for look in looks]

    def moved(one: CostTable, other: CostTable) -> float:
        return median(abs(other.seconds(OFF, v).total / one.seconds(OFF, v).total - 1) for v in views)

    return max(moved(one, other) for one, other in pairwise(tables))


def _chains_only(config: ClusterConfig) -> ClusterConfig:
    """A tree's or a suffix draft's acceptance does not follow from a chain's."""
    tree = config.model_dump()
    chains = [s for s in tree["speculation"]["selector"].get("strategies", ()) if s["drafter"] == "eagle"]
    chains = [s for s in chains if s["topk"] == 1] or [STATIC.model_dump()]
    tree["speculation"]["selector"] = {"type": "adaptive", "strategies": chains}
    return ClusterConfig.model_validate(tree)
