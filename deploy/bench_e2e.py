"""`longtail bench e2e`: the same GRPO run in every mode of speculation: what a step takes, whether they learn alike.

Modes are interleaved seed by seed. On the native engine without a GPU the services run side by side on time lines of
their own in processor time (`side_by_side`), so that the figures are those of as many cores as there are services,
whatever else the machine does; anything else, or all with `on_ray`, runs on Ray and is measured by the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from deploy.e2e_figures import result, run_line, write
from deploy.e2e_runs import STEPS_FILE, Run, Say, measured, step_s
from deploy.modes import drafting_strategies, in_mode, modes_of
from services.config.naming import strategy_name
from services.config.schema import ClusterConfig
from services.config.schema import NativeEngine as NativeEngineConfig
from services.config.speculation import StrategyConfig
from services.core.errors import ConfigError, LongtailError, StopRequested
from services.models.device import pick_device


@dataclass(frozen=True)
class Plan:
    """What to run. `modes` None: all that the engine can; `static`: the strategy of mode static by its name, None: the
    best one in `trial_steps` steps of each. `out`: where steps and run folders are
    written as they come, and the figures after each run."""

    seeds: tuple[int, ...]
    modes: tuple[str, ...] | None = None
    static: str | None = None
    trial_steps: int = 2
    on_ray: bool = False
    out: Path | None = None


def run_bench(config: ClusterConfig, plan: Plan, say: Say = print) -> dict[str, Any]:
    """Raises ConfigError for modes and strategies that there are not, and LongtailError when no run has figures."""
    modes = _chosen_modes(config, plan.modes)
    on_ray = plan.on_ray or not _fits_side_by_side(config)
    given = None if plan.static is None else _named(config, plan.static)
    for mode in modes:
        in_mode(config, mode, given)  # what cannot be run is told before hours of what can
    if plan.out is not None:
        plan.out.mkdir(parents=True, exist_ok=True)
        (plan.out / STEPS_FILE).unlink(missing_ok=True)
    runs = list[Run]()
    best = given
    if "static" in modes and best is None:
        best = best_fixed(config, plan, on_ray, say)
    for seed, mode in ((seed, mode) for seed in plan.seeds for mode in modes):
        runs.append(measured(_of_seed(in_mode(config, mode, best), seed), mode, on_ray, say, plan.out))
        if runs[-1].counts:
            say(run_line(runs[-1]))
            if plan.out is not None:
                write(plan.out, result(config, runs, modes, best, on_ray))
        if runs[-1].stopped:
            break
    return result(config, runs, modes, best, on_ray)


def _chosen_modes(config: ClusterConfig, names: Sequence[str] | None) -> tuple[str, ...]:
    there = modes_of(config)
    if names is not None and (unknown := [name for name in names if name not in there]):
        raise ConfigError(
            f"--modes has {', '.join(unknown)}: with rollout.engine.type {config.rollout.engine.type} there are "
            f"{', '.join(there)}"
        )
    return tuple(names or there)


def _fits_side_by_side(config: ClusterConfig) -> bool:
    return isinstance(config.rollout.engine, NativeEngineConfig) and pick_device(config.model.device).type == "cpu"


def _named(config: ClusterConfig, name: str) -> StrategyConfig:
    there = {strategy_name(s): s for s in drafting_strategies(config)}
    if name not in there:
        raise ConfigError(f"--static {name} is none of the run's strategies: {', '.join(there)}")
    return there[name]


def best_fixed(config: ClusterConfig, plan: Plan, on_ray: bool, say: Say) -> StrategyConfig:
    """The candidate with the shortest steps in one short run each. Raises LongtailError when none has figures."""
    found, failed = dict[StrategyConfig, float](), ""
    for strategy in drafting_strategies(config):
        tree = in_mode(config, "static", strategy).model_dump()
        tree["run"]["steps"] = plan.trial_steps
        trial = _of_seed(ClusterConfig.model_validate(tree), config.run.seed)
        run = measured(trial, strategy_name(strategy), on_ray, say, plan.out, keep=False)
        if run.stopped:
            raise StopRequested("stopped while the best fixed strategy was looked for")
        if run.counts:
            found[strategy] = median(step_s(m) for m in run.counted)
            say(f"  {strategy_name(strategy):<14} {found[strategy]:.2f} s a step")
        failed = failed or run.error
    if not found:
        raise LongtailError(f"no strategy for mode static has figures: {failed}")
    return min(found, key=lambda s: found[s])


def _of_seed(config: ClusterConfig, seed: int) -> ClusterConfig:
    run = config.run.model_copy(update={"seed": seed, "eval_prompts": 0, "compare_prompts": 0, "checkpoint_every": 0})
    return config.model_copy(update={"run": run})
