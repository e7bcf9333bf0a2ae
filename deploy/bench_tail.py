"""`longtail bench tail`: what moving the last rollouts of a step frees, and what it does to the rollout time.

The same steps with `rollout.consolidate` off and on, interleaved, real services on time lines of their own
(`side_by_side`). So that both generate the same responses, which differ by chance otherwise and with them the length of
the tail, sampling is next to greedy here and the policy stands still.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from deploy.inputs import load_inputs
from deploy.local import build_services
from deploy.provenance import provenance
from deploy.side_by_side import SideBySideHost
from services.config.schema import ClusterConfig
from services.coordinator.coordinator import Coordinator
from services.core.types import EvalResult, Group, ProgressView, RunEvent, SlotSpan, StepMetrics, StrategySpan

STEPS = 4  # the drafter has nothing to learn from in the first one: it is the warm-up
NEAR_GREEDY = 0.01
STILL = 1e-12


class _Notes:
    """A RunObserver that keeps steps, moves and the responses' lengths."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.moves: list[str] = []
        self.responses: list[tuple[str, int]] = []

    def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        self.responses += [(r.rollout_id, len(r.response_ids)) for g in groups for r in g.rollouts]

    def evaluation(self, result: EvalResult) -> None: ...

    def span(self, span: SlotSpan) -> None: ...

    def strategy(self, span: StrategySpan) -> None: ...

    def event(self, event: RunEvent) -> None:
        if event.kind == "tail_moved":
            self.moves.append(event.message)

    def progress(self, view: ProgressView) -> None: ...

    def endpoint(self, host: str, port: int) -> None: ...

    def values(self, state: Mapping[str, Sequence[float]]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


def run_bench(config: ClusterConfig, repeats: int) -> dict[str, Any]:
    """Per run, sums over the steps after the first: medians over the repeats. `freed_slot_s`: seconds in which slots
    had nothing to generate while others did, on minus off; `rollout_time_ratio`: on through off, pair by pair."""
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    same, total = 0, 0
    for repeat in range(repeats):
        off, on = (_run(_variant(config, enabled, config.run.seed + repeat)) for enabled in (False, True))
        lengths = dict(off.responses)
        same += sum(lengths[i] == n for i, n in on.responses)
        total += len(on.responses)
        pairs.append((_figures(off), _figures(on)))
        print(json.dumps({"off": pairs[-1][0], "on": pairs[-1][1], "moves": on.moves}))
    ratios = [on["rollout_s"] / off["rollout_s"] for off, on in pairs]
    result = {
        "bench": "tail",
        **provenance(),
        "servers": config.rollout.num_servers,
        "rollouts_per_step": config.rollout.prompts_per_step * config.rollout.group_size,
        "steps": STEPS - 1,
        "repeats": repeats,
        "consolidate": config.rollout.consolidate.model_dump(exclude={"enabled"}),
        "off": _medians([off for off, _ in pairs]),
        "on": _medians([on for _, on in pairs]),
        "freed_slot_s": round(median(on["free_slot_s"] - off["free_slot_s"] for off, on in pairs), 3),
        "rollout_time_ratio": round(median(ratios), 4),
        "rollout_time_ratios": [round(r, 4) for r in ratios],
        "equal_lengths": round(same / total, 4),
    }
    return result


def _variant(config: ClusterConfig, enabled: bool, seed: int) -> ClusterConfig:
    tree = config.model_dump()
    tree["rollout"]["consolidate"]["enabled"] = enabled
    tree["rollout"]["sampling"]["temperature"] = NEAR_GREEDY
    tree["policy"]["learning_rate"] = STILL
    tree["run"] |= {"steps": STEPS, "seed": seed, "eval_prompts": 0, "compare_prompts": 0, "checkpoint_every": 0}
    return ClusterConfig.model_validate(tree)


def _run(config: ClusterConfig) -> _Notes:
    notes, host = _Notes(), SideBySideHost()
    with ExitStack() as closing:
        services = build_services(config, host, closing, time.process_time)
        Coordinator(config, load_inputs(config), services, notes, host.clock).run()
    return notes


def _figures(notes: _Notes) -> dict[str, float]:
    steps = notes.steps[1:]
    return {
        "rollout_s": round(sum(m.rollout_s for m in steps), 3),
        "free_slot_s": round(sum(m.idle_s + m.drafting_s for m in steps), 3),
        "drafting_s": round(sum(m.drafting_s for m in steps), 3),
        "micro_steps": sum(m.drafter_micro_steps for m in steps),
        "moves": len(notes.moves),
        "longest": max(m.response_len_max for m in steps),
    }


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(r[name] for r in runs) for name in runs[0]}
