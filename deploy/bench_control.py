"""`longtail bench control`: the real coordinator against many slots that are not there, over Ray on one machine.

The coordinator is the actor of a run; a few host actors stand for the slots (`slot_host`), and all calls go over Ray.
Measured:

- `decision_ms`: from the moment that an answer is there, in the coordinator's process, until the order that follows
  has been given to Ray: `longtail_decision_seconds`, as every run tells it. Each quantile is the bound of its bucket,
  so that the truth is no higher.
- `latency_ms`: what a server sees of it, from its answer until its next order has arrived: the same with Ray's
  transport both ways and the host's own queue, which a server of its own machine does not have.
- answers per second; the coordinator's memory; its share of a processor core, and that of all hosts together, which
  shares the machine with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import psutil
import ray

from deploy.cluster import start_coordinator
from deploy.modes import in_mode
from deploy.processes import processor_s
from deploy.provenance import provenance
from deploy.session import ray_session
from deploy.simulating import Question, scenario_of, sized
from deploy.slot_host import SlotHandle, SlotHost, whole_prompt
from services.config.schema import ClusterConfig
from services.coordinator.stats import quantile
from services.coordinator.telemetry.table import BY_NAME
from services.coordinator.telemetry.values import State
from services.core.errors import WaitTimeoutError
from services.simulator.scenario import LogNormal
from services.simulator.shapes import SHAPES
from services.simulator.world import build_inputs

LOOK_S = 0.5  # how often a driver fetches what the coordinator has to tell
START_S = 300.0
DECISIONS = "longtail_decision_seconds"


@dataclass(frozen=True)
class Load:
    """`advance_s`: how often a server reports, `reports_per_s` permitting, which is of all together; `median`,
    `longest`: of responses, in tokens of about 7 ms: a phase lasts as long as a real one's tail."""

    slots: int = 1000
    hosts: int = 2
    advance_s: float = 1.0
    reports_per_s: float = 400.0
    steps: int = 1
    rollouts: int = 8
    median: float = 1500.0
    longest: int = 4500
    limit_s: float = 600.0


def run_bench(config: ClusterConfig, load: Load, say: Callable[[str], None] = print) -> dict[str, Any]:
    question = Question(max_tokens=load.longest, rollouts=load.rollouts, steps=load.steps - 1, advance_s=load.advance_s)
    config = _talkative(sized(config, question, load.slots), load.reports_per_s)
    lengths = LogNormal(load.median, 1.0, load.longest)
    scenario = scenario_of(SHAPES["7b"], lengths, load.slots, 0.0, question.stretch, 0)
    with ray_session(config, check=False):
        made = ray.remote(SlotHost).options(num_cpus=0, max_concurrency=100_000)
        slots = [range(h, load.slots, load.hosts) for h in range(load.hosts)]
        hosts = [made.remote(config, scenario, list(part), h == 0) for h, part in enumerate(slots)]
        handles: dict[str, Any] = {}
        for host, part in zip(hosts, slots, strict=True):
            for slot in part:
                handles |= {f"{kind}-{slot}": SlotHandle(host, kind, slot) for kind in ("rollout", "drafter")}
        handles |= {name: SlotHandle(hosts[0], name, 0) for name in ("policy", "reward")}
        processes = _answering(hosts)
        inputs = build_inputs(config, scenario)
        inputs = replace(inputs, train=tuple(whole_prompt(p) for p in inputs.train))
        coordinator = start_coordinator(config, inputs, "bench-control", handles, None)
        found = _follow(coordinator, processes, load.limit_s)
        calls, gaps = _measured(hosts)
    return _result(load, found, calls, gaps, say)


def _talkative(config: ClusterConfig, reports_per_s: float) -> ClusterConfig:
    """The reference's rules, the drafter trained in every step: the most that training has to say."""
    tree = in_mode(config, "tlt").model_dump()
    tree["drafter"]["training"]["every"] = 1
    tree["coordinator"]["reports_per_s"] = reports_per_s
    return ClusterConfig.model_validate(tree)


def _answering(hosts: Sequence[Any]) -> list[psutil.Process]:
    ready, late = ray.wait([h.process_id.remote() for h in hosts], num_returns=len(hosts), timeout=START_S)
    if late:
        raise WaitTimeoutError(f"{len(late)} of {len(hosts)} hosts of slots did not start within {START_S:.0f} s")
    return [psutil.Process(pid) for pid in ray.get(ready, timeout=START_S)]


@dataclass(frozen=True)
class _Followed:
    summary: dict[str, Any]
    seconds: float
    rss_start: int
    rss_most: int
    cpu_s: float
    hosts_cpu_s: float
    steps: tuple[Any, ...]
    decisions: tuple[float, ...]


class _News:
    """What the coordinator told: the steps, and the newest values of its metrics."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self.steps: list[Any] = []
        self.values: State = {}

    def fetch(self) -> None:
        for method, args in ray.get(self._coordinator.observations.remote(), timeout=START_S):
            if method == "step":
                self.steps.append(args[0])
            if method == "values":
                self.values = args[0]


def _follow(coordinator: Any, hosts: Sequence[psutil.Process], limit_s: float) -> _Followed:
    """Fetch what it tells, as a driver does, until its run ends. Raises WaitTimeoutError."""
    process = psutil.Process(ray.get(coordinator.process_id.remote(), timeout=START_S))
    before, hosts_before, started = _cpu_s([process]), _cpu_s(hosts), time.monotonic()
    rss_start = rss = process.memory_info().rss
    running, news = coordinator.run.remote(), _News(coordinator)
    while not ray.wait([running], timeout=LOOK_S)[0]:
        news.fetch()
        rss = max(rss, process.memory_info().rss)
        if time.monotonic() - started > limit_s:
            raise WaitTimeoutError(f"the run of {limit_s:.0f} s at most goes on: give fewer slots or a longer limit")
    seconds, cpu_s, hosts_cpu_s = time.monotonic() - started, _cpu_s([process]) - before, _cpu_s(hosts) - hosts_before
    news.fetch()
    summary = ray.get(running, timeout=START_S)
    decisions = tuple(news.values[DECISIONS])
    return _Followed(summary, seconds, rss_start, rss, cpu_s, hosts_cpu_s, tuple(news.steps), decisions)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(map(processor_s, processes))


def bucket_quantile(metric: str, numbers: Sequence[float], share: float) -> float:
    """The bound of the bucket in which the quantile lies, of a histogram's [sum, count per bucket ...]; infinite in the
    last one, 0 of nothing."""
    counts, bounds = numbers[1:], (*BY_NAME[metric].buckets, math.inf)
    upto = list(accumulate(counts))
    return next((bound for bound, n in zip(bounds, upto, strict=True) if n and n >= share * upto[-1]), 0.0)


def _measured(hosts: Sequence[Any]) -> tuple[int, list[float]]:
    answers = ray.get([h.measured.remote() for h in hosts], timeout=START_S)
    return sum(calls for calls, _ in answers), [gap for _, gaps in answers for gap in gaps]


def _result(
    load: Load, found: _Followed, calls: int, gaps: Sequence[float], say: Callable[[str], None]
) -> dict[str, Any]:
    result = {
        "bench": "control",
        **provenance(),
        "cores": psutil.cpu_count(),
        "slots": load.slots,
        "hosts": load.hosts,
        "advance_s": load.advance_s,
        "reports_per_s": load.reports_per_s,
        "steps": found.summary["steps"],
        "rollouts": found.summary["rollouts"],
        "seconds": round(found.seconds, 1),
        "step_s": [round(m.rollout_s + m.policy_s + m.publish_s, 1) for m in found.steps],
        "publish_s": [round(m.publish_s, 2) for m in found.steps],
        "calls": calls,
        "decisions_per_s": round(calls / found.seconds, 1),
        "decision_ms": {
            f"p{q}": round(1e3 * bucket_quantile(DECISIONS, found.decisions, q / 100), 2) for q in (50, 90, 99)
        },
        "decision_mean_ms": round(1e3 * found.decisions[0] / max(1, sum(found.decisions[1:])), 2),
        "latency_ms": {f"p{q}": round(1e3 * quantile(gaps, q / 100), 2) for q in (50, 90, 99)},
        "latencies": len(gaps),
        "coordinator_mb": round(found.rss_most / 2**20, 1),
        "coordinator_mb_start": round(found.rss_start / 2**20, 1),
        "coordinator_cpu_share": round(found.cpu_s / found.seconds, 3),
        "hosts_cpu_share": round(found.hosts_cpu_s / found.seconds, 3),
        "events": found.summary["events"],
    }
    say(
        f"{load.slots} slots, {calls} calls in {found.seconds:.0f} s: {result['decisions_per_s']} a second; "
        f"an answer is decided on within {result['decision_ms']} ms, a server waits {result['latency_ms']} ms "
        f"({len(gaps)} of them); coordinator {result['coordinator_mb']} MiB, "
        f"{found.cpu_s / found.seconds:.0%} of a core, the hosts {found.hosts_cpu_s / found.seconds:.0%}"
    )
    return result
