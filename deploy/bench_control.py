"""`longtail bench control`: the real coordinator against many slots that are not there, over Ray on one machine.

The coordinator is the actor of a run; a few host actors stand for the slots (`slot_host`), and all calls go over Ray.
Measured: how long a server waits from its answer until it is told to go on (transport both ways, the coordinator's turn
and the host's loop), answers per second, and the coordinator's memory and processor time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from deploy.cluster import start_coordinator
from deploy.modes import in_mode
from deploy.provenance import provenance
from deploy.session import ray_session
from deploy.simulating import Question, scenario_of, sized
from deploy.slot_host import SlotHandle, SlotHost
from services.config.schema import ClusterConfig
from services.coordinator.stats import quantile
from services.core.errors import WaitTimeoutError
from services.simulator.scenario import LogNormal
from services.simulator.shapes import SHAPES
from services.simulator.world import build_inputs

LOOK_S = 0.5  # how often a driver fetches what the coordinator has to tell
START_S = 300.0


@dataclass(frozen=True)
class Load:
    """`advance_s`: how often a server reports; `median`, `longest`: of responses, in tokens of about 7 ms."""

    slots: int = 1000
    hosts: int = 2
    advance_s: float = 1.0
    steps: int = 1
    rollouts: int = 8
    median: float = 400.0
    longest: int = 1500
    limit_s: float = 600.0


def run_bench(config: ClusterConfig, load: Load, say: Callable[[str], None] = print) -> dict[str, Any]:
    question = Question(max_tokens=load.longest, rollouts=load.rollouts, steps=load.steps - 1, advance_s=load.advance_s)
    config = in_mode(sized(config, question, load.slots), "tlt")
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
        _answering(hosts)
        coordinator = start_coordinator(config, build_inputs(config, scenario), "bench-control", handles, None)
        found = _follow(coordinator, load.limit_s)
        calls, gaps = _measured(hosts)
    return _result(load, found, calls, gaps, say)


def _answering(hosts: Sequence[Any]) -> None:
    ready, late = ray.wait([h.process_id.remote() for h in hosts], num_returns=len(hosts), timeout=START_S)
    if late:
        raise WaitTimeoutError(f"{len(late)} of {len(hosts)} hosts of slots did not start within {START_S:.0f} s")
    ray.get(ready, timeout=START_S)


@dataclass(frozen=True)
class _Followed:
    summary: dict[str, Any]
    seconds: float
    rss_start: int
    rss_most: int
    cpu_s: float
    steps: tuple[Any, ...]


def _follow(coordinator: Any, limit_s: float) -> _Followed:
    """Fetch what it tells, as a driver does, until its run ends. Raises WaitTimeoutError."""
    process = psutil.Process(ray.get(coordinator.process_id.remote(), timeout=START_S))
    before, started = process.cpu_times(), time.monotonic()
    rss_start = rss = process.memory_info().rss
    running, steps = coordinator.run.remote(), list[Any]()
    while not ray.wait([running], timeout=LOOK_S)[0]:
        news = ray.get(coordinator.observations.remote(), timeout=START_S)
        steps += [args[0] for method, args in news if method == "step"]
        rss = max(rss, process.memory_info().rss)
        if time.monotonic() - started > limit_s:
            raise WaitTimeoutError(f"the run of {limit_s:.0f} s at most goes on: give fewer slots or a longer limit")
    seconds, after = time.monotonic() - started, process.cpu_times()
    steps += [a[0] for m, a in ray.get(coordinator.observations.remote(), timeout=START_S) if m == "step"]
    cpu_s = after.user + after.system - before.user - before.system
    return _Followed(ray.get(running, timeout=START_S), seconds, rss_start, rss, cpu_s, tuple(steps))


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
        "steps": found.summary["steps"],
        "rollouts": found.summary["rollouts"],
        "seconds": round(found.seconds, 1),
        "step_s": [round(m.rollout_s + m.policy_s + m.publish_s, 1) for m in found.steps],
        "publish_s": [round(m.publish_s, 2) for m in found.steps],
        "calls": calls,
        "decisions_per_s": round(calls / found.seconds, 1),
        "latency_ms": {f"p{q}": round(1e3 * quantile(gaps, q / 100), 2) for q in (50, 90, 99)},
        "latencies": len(gaps),
        "coordinator_mb": round(found.rss_most / 2**20, 1),
        "coordinator_mb_start": round(found.rss_start / 2**20, 1),
        "coordinator_cpu_share": round(found.cpu_s / found.seconds, 3),
        "events": found.summary["events"],
    }
    say(
        f"{load.slots} slots, {calls} calls in {found.seconds:.0f} s: {result['decisions_per_s']} a second; "
        f"from an answer to the next order {result['latency_ms']} ms ({len(gaps)} of them); coordinator "
        f"{result['coordinator_mb']} MiB, {found.cpu_s / found.seconds:.0%} of a core"
    )
    return result
