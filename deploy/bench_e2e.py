"""`longtail bench e2e`: the same GRPO run in every mode of speculation: what a step takes, whether they learn alike.

Modes are interleaved seed by seed. On the native engine without a GPU the services run side by side on time lines of
their own in processor time (`side_by_side`), so that the figures are those of as many cores as there are services,
whatever else the machine does; anything else runs on Ray and is measured by the clock.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from deploy.inputs import load_inputs
from deploy.local import build_services
from deploy.modes import drafting_strategies, in_mode, modes_of
from deploy.provenance import provenance
from deploy.side_by_side import SideBySideHost, single_threaded
from services.config.naming import strategy_name
from services.config.schema import ClusterConfig
from services.config.schema import NativeEngine as NativeEngineConfig
from services.config.speculation import StrategyConfig
from services.coordinator.coordinator import Coordinator
from services.core.types import StepMetrics
from services.models.device import pick_device
from services.report.modes import draw_modes
from services.simulator.world import Notes

PHASES = ("rollout_s", "reward_s", "policy_s", "publish_s")
FLIPS = 4000
LEVEL = 0.01  # of the test that rewards agree, shared out over the modes


@dataclass(frozen=True)
class Run:
    mode: str
    seed: int
    steps: tuple[StepMetrics, ...]
    servers: int

    @property
    def counted(self) -> tuple[StepMetrics, ...]:
        """Without the first: nobody knows anything there yet, neither selector nor drafter trainer."""
        return self.steps[1:] or self.steps


def run_bench(
    config: ClusterConfig,
    seeds: Sequence[int],
    modes: Sequence[str] | None = None,
    trial_steps: int = 2,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    modes = tuple(modes or modes_of(config))
    best = best_fixed(config, trial_steps, say) if "static" in modes else None
    runs = list[Run]()
    for seed in seeds:
        for mode in modes:
            runs.append(run_once(_of_seed(in_mode(config, mode, best), seed), mode))
            say(_line(runs[-1]))
    return result(config, runs, modes, best)


def best_fixed(config: ClusterConfig, steps: int, say: Callable[[str], None]) -> StrategyConfig:
    """The candidate with the shortest steps in one short run each."""
    found = dict[StrategyConfig, float]()
    for strategy in drafting_strategies(config):
        tree = in_mode(config, "static", strategy).model_dump()
        tree["run"]["steps"] = steps
        run = run_once(_of_seed(ClusterConfig.model_validate(tree), config.run.seed), "static")
        found[strategy] = median(_step_s(m) for m in run.counted)
        say(f"  {strategy_name(strategy):<14} {found[strategy]:.2f} s a step")
    return min(found, key=lambda s: found[s])


def run_once(config: ClusterConfig, mode: str) -> Run:
    notes = Notes()
    native = isinstance(config.rollout.engine, NativeEngineConfig)
    if native and pick_device(config.model.device).type == "cpu":
        config, host = single_threaded(config), SideBySideHost()
        with ExitStack() as closing:
            services = build_services(config, host, closing, time.process_time)
            Coordinator(config, load_inputs(config), services, notes, host.clock).run()
    else:
        from deploy.cluster import run_on_ray

        run_on_ray(config, notes)
    return Run(mode, config.run.seed, tuple(notes.steps), config.rollout.num_servers)


def _of_seed(config: ClusterConfig, seed: int) -> ClusterConfig:
    run = config.run.model_copy(update={"seed": seed, "eval_prompts": 0, "compare_prompts": 0, "checkpoint_every": 0})
    return config.model_copy(update={"run": run})


# ---------------------------------------------------------------------------- figures


def result(
    config: ClusterConfig, runs: Sequence[Run], modes: Sequence[str], best: StrategyConfig | None
) -> dict[str, Any]:
    step_s = {mode: median(_step_s(m) for m in _steps(runs, mode)) for mode in modes}
    off = step_s.get("off")
    return {
        "bench": "e2e",
        **provenance(),
        "clock": "processor time, services side by side" if _by_processor(config) else "wall clock",
        "seeds": sorted({r.seed for r in runs}),
        "steps": len(runs[0].steps),
        "servers": config.rollout.num_servers,
        "rollouts_per_step": config.rollout.prompts_per_step * config.rollout.group_size,
        "static_strategy": None if best is None else strategy_name(best),
        "step_s": {mode: round(s, 4) for mode, s in step_s.items()},
        "speedup": {mode: round(off / s, 4) for mode, s in step_s.items()} if off else {},
        "speedup_range": _ranges(runs, modes),
        "modes": {mode: _figures(runs, mode) for mode in modes},
        "rewards_agree": {m: agreement(runs, m, len(modes)) for m in modes if m != "off" and off},
    }


def _by_processor(config: ClusterConfig) -> bool:
    return isinstance(config.rollout.engine, NativeEngineConfig) and pick_device(config.model.device).type == "cpu"


def _figures(runs: Sequence[Run], mode: str) -> dict[str, Any]:
    """Medians over the counted steps of all seeds; idle and drafting seconds are a mean step's, over all slots."""
    steps = _steps(runs, mode)
    free_s, drafting_s = sum(m.idle_s + m.drafting_s for m in steps), sum(m.drafting_s for m in steps)
    lengths = [m.acceptance_length for m in steps if m.acceptance_length]
    joules = [sum(m.energy_j.values()) for m in steps if m.energy_j]
    used: dict[str, int] = {}
    for m in steps:
        for name, count in m.steps_by_strategy.items():
            used[name] = used.get(name, 0) + count
    return {
        **{phase: round(median(getattr(m, phase) for m in steps), 4) for phase in PHASES},
        "rollout_share": round(sum(m.rollout_s for m in steps) / sum(_step_s(m) for m in steps), 4),
        "tokens_per_s": round(sum(m.response_tokens for m in steps) / sum(m.rollout_s for m in steps), 1),
        "acceptance_length": round(mean(lengths), 4) if lengths else None,
        "idle_s": round(free_s / len(steps), 4),
        "reclaimed_share": round(drafting_s / free_s, 4) if free_s else 0.0,
        "joules_per_step": round(mean(joules), 1) if joules else None,
        "steps_by_strategy": used,
        "reward": [[round(m.reward_mean, 4) for m in r.steps] for r in runs if r.mode == mode],
        "step_s": [[round(_step_s(m), 4) for m in r.steps] for r in runs if r.mode == mode],
    }


def _ranges(runs: Sequence[Run], modes: Sequence[str]) -> dict[str, list[float]]:
    """Of each seed's own ratio of medians: least and most."""

    def of(mode: str) -> dict[int, float]:
        return {r.seed: median(_step_s(m) for m in r.counted) for r in runs if r.mode == mode}

    off = of("off")
    ratios = {mode: [off[seed] / s for seed, s in of(mode).items() if seed in off] for mode in modes}
    return {mode: [round(min(r), 4), round(max(r), 4)] for mode, r in ratios.items() if r}


def agreement(runs: Sequence[Run], mode: str, tests: int) -> dict[str, Any]:
    """Whether rewards differ from those of `off` by more than chance: the same seeds and steps in pairs, and the signs
    of their differences thrown anew (a sign-flip test, two-sided). `agree`: p is above LEVEL over the number of tests.
    """
    pairs = {(r.seed, m.step): m.reward_mean for r in runs if r.mode == "off" for m in r.steps}
    found = [m.reward_mean - pairs[r.seed, m.step] for r in runs if r.mode == mode for m in r.steps]
    p = sign_flip_p(found, random.Random(0))
    return {"mean_difference": round(mean(found), 5), "p": round(p, 4), "agree": p > LEVEL / tests, "pairs": len(found)}


def sign_flip_p(differences: Sequence[float], rng: random.Random) -> float:
    """The share of sign patterns under which their sum lies as far from 0; every pattern counts where they are few."""
    seen = abs(sum(differences)) - 1e-12
    if len(differences) <= 11:
        patterns = range(2 ** len(differences))
        sums = [sum(-d if bits >> i & 1 else d for i, d in enumerate(differences)) for bits in patterns]
        return sum(abs(s) >= seen for s in sums) / len(sums)
    thrown = sum(abs(sum(d if rng.random() < 0.5 else -d for d in differences)) >= seen for _ in range(FLIPS))
    return (thrown + 1) / (FLIPS + 1)


def _steps(runs: Sequence[Run], mode: str) -> list[StepMetrics]:
    return [m for r in runs if r.mode == mode for m in r.counted]


def _step_s(m: StepMetrics) -> float:
    return sum(getattr(m, phase) for phase in PHASES)


def _line(run: Run) -> str:
    alone = replace(run, mode="")
    seconds = median(_step_s(m) for m in alone.counted)
    lengths = [m.acceptance_length for m in alone.counted if m.acceptance_length]
    accepted = f"{mean(lengths):.2f}" if lengths else "-"
    rewards = mean(m.reward_mean for m in alone.steps)
    return f"seed {run.seed} {run.mode:<7} {seconds:>7.2f} s a step, acceptance length {accepted}, reward {rewards:.3f}"


def table(found: Mapping[str, Any]) -> str:
    head = f"{'mode':<8}{'step s':>8}{'x off':>7}{'rollout':>9}{'policy':>8}{'tokens/s':>10}{'accept':>8}{'idle s':>8}"
    lines = [head + f"{'reclaimed':>11}{'rewards differ, p':>19}"]
    for mode, row in found["modes"].items():
        accepted = "-" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
        p = found["rewards_agree"].get(mode, {}).get("p", "-")
        lines.append(
            f"{mode:<8}{found['step_s'][mode]:>8.2f}{found['speedup'].get(mode, 1.0):>7.2f}{row['rollout_s']:>9.2f}"
            f"{row['policy_s']:>8.2f}{row['tokens_per_s']:>10.0f}{accepted:>8}{row['idle_s']:>8.2f}"
            f"{row['reclaimed_share']:>11.0%}{p:>19}"
        )
    return "\n".join(lines)


def write(folder: Path, found: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "e2e.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "e2e.svg").write_text(draw_modes(found), encoding="utf-8")
