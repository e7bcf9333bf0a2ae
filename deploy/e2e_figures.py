"""The figures of `longtail bench e2e`: what runs in several modes come to, beside each other and against `off`."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from deploy.e2e_runs import PHASES, Run, step_s
from deploy.provenance import provenance
from services.config.naming import strategy_name
from services.config.schema import ClusterConfig
from services.config.speculation import StrategyConfig
from services.core.errors import LongtailError
from services.core.types import StepMetrics
from services.models.files import model_dir, read_grown
from services.report.modes import draw_modes

FLIPS = 4000
LEVEL = 0.01  # of the test that rewards agree, shared out over the modes


def result(
    config: ClusterConfig, runs: Sequence[Run], modes: Sequence[str], best: StrategyConfig | None, on_ray: bool
) -> dict[str, Any]:
    """Of the runs that have figures; `unfinished` tells of those that ended early. Raises LongtailError when there is
    none."""
    unfinished = [{"mode": r.mode, "seed": r.seed, "steps": len(r.steps), "error": r.error} for r in runs if r.error]
    runs = [r for r in runs if r.counts]
    if not runs:
        raise LongtailError(f"no run has figures: {unfinished[0]['error']}")
    modes = [mode for mode in modes if any(r.mode == mode for r in runs)]
    seconds = {mode: median(step_s(m) for m in _steps(runs, mode)) for mode in modes}
    off = seconds.get("off")
    return {
        "bench": "e2e",
        **provenance(),
        "grown": read_grown(model_dir(config.model.path)),
        "clock": "wall clock" if on_ray else "processor time, services side by side",
        "seeds": sorted({r.seed for r in runs}),
        "steps": config.run.steps,
        "servers": config.rollout.num_servers,
        "rollouts_per_step": config.rollout.prompts_per_step * config.rollout.group_size,
        "static_strategy": None if best is None else strategy_name(best),
        "step_s": {mode: round(s, 4) for mode, s in seconds.items()},
        "speedup": {mode: round(off / s, 4) for mode, s in seconds.items()} if off else {},
        "speedup_range": _ranges(runs, modes),
        "speedup_same_steps": {mode: round(r, 4) for mode in modes if (r := _same_steps(runs, mode)) is not None},
        "modes": {mode: _figures(runs, mode) for mode in modes},
        "rewards_agree": {m: agreement(runs, m, len(modes)) for m in modes if m != "off" and _pairs(runs, m)},
        "unfinished": unfinished,
    }


def _figures(runs: Sequence[Run], mode: str) -> dict[str, Any]:
    """Medians over the counted steps of all seeds; `mean_step` and what is idle are a mean step's, over all slots.
    `wall_s`: from the end of a step to the next one's, with what lies between the phases. `surprise_errors`: of the
    step furthest from 0; tens of them mean that speculation was not lossless, and the mode's figures are void."""
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
        "mean_step": {phase: round(mean(getattr(m, phase) for m in steps), 4) for phase in PHASES},
        "wall_s": round(median(_wall_s(runs, mode)), 4),
        "rollout_share": round(sum(m.rollout_s for m in steps) / sum(step_s(m) for m in steps), 4),
        "tokens_per_s": round(sum(m.response_tokens for m in steps) / sum(m.rollout_s for m in steps), 1),
        "acceptance_length": round(mean(lengths), 4) if lengths else None,
        "idle_s": round(free_s / len(steps), 4),
        "reclaimed_share": round(drafting_s / free_s, 4) if free_s else 0.0,
        "joules_per_step": round(mean(joules), 1) if joules else None,
        "response_len": [median(getattr(m, f"response_len_{q}") for m in steps) for q in ("p50", "p99", "max")],
        "steps_by_strategy": used,
        "surprise_errors": round(max((m.surprise_errors for r in runs if r.mode == mode for m in r.steps), key=abs), 2),
        "reward": [[round(m.reward_mean, 4) for m in r.steps] for r in runs if r.mode == mode],
        "step_s": [[round(step_s(m), 4) for m in r.steps] for r in runs if r.mode == mode],
    }


def _ranges(runs: Sequence[Run], modes: Sequence[str]) -> dict[str, list[float]]:
    """Of each seed's own ratio of medians: least and most."""

    def of(mode: str) -> dict[int, float]:
        return {r.seed: median(step_s(m) for m in r.counted) for r in runs if r.mode == mode}

    off = of("off")
    ratios = {mode: [off[seed] / s for seed, s in of(mode).items() if seed in off] for mode in modes}
    return {mode: [round(min(r), 4), round(max(r), 4)] for mode, r in ratios.items() if r}


def _same_steps(runs: Sequence[Run], mode: str) -> float | None:
    """Seconds of `off` over those of `mode`, each summed over the counted steps that both have. Of one seed these have
    the same prompts, so that a step whose problems are long weighs in both; a median of few steps may be of another."""
    off = {(r.seed, m.step): step_s(m) for r in runs if r.mode == "off" for m in r.counted}
    own = {(r.seed, m.step): step_s(m) for r in runs if r.mode == mode for m in r.counted}
    both = off.keys() & own.keys()
    return sum(off[at] for at in both) / sum(own[at] for at in both) if both else None


def agreement(runs: Sequence[Run], mode: str, tests: int) -> dict[str, Any]:
    """Whether rewards differ from those of `off` by more than chance: the same seeds and steps in pairs, and the signs
    of their differences thrown anew (a sign-flip test, two-sided). `agree`: p is above LEVEL over the number of tests.
    """
    found = _pairs(runs, mode)
    p = sign_flip_p(found, random.Random(0))
    return {"mean_difference": round(mean(found), 5), "p": round(p, 4), "agree": p > LEVEL / tests, "pairs": len(found)}


def _pairs(runs: Sequence[Run], mode: str) -> list[float]:
    """Differences of the rewards, of all steps that `off` came to as well."""
    off = {(r.seed, m.step): m.reward_mean for r in runs if r.mode == "off" for m in r.steps}
    steps = [(r.seed, m) for r in runs if r.mode == mode for m in r.steps]
    return [m.reward_mean - off[seed, m.step] for seed, m in steps if (seed, m.step) in off]


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


def _wall_s(runs: Sequence[Run], mode: str) -> list[float]:
    own = [r.steps for r in runs if r.mode == mode]
    return [b.at_s - a.at_s for steps in own for a, b in pairwise(steps)] or [steps[0].at_s for steps in own]


def run_line(run: Run) -> str:
    seconds = median(step_s(m) for m in run.counted)
    lengths = [m.acceptance_length for m in run.counted if m.acceptance_length]
    accepted = f"{mean(lengths):.2f}" if lengths else "-"
    rewards = mean(m.reward_mean for m in run.steps)
    return f"seed {run.seed} {run.mode:<7} {seconds:>7.2f} s a step, acceptance length {accepted}, reward {rewards:.3f}"


def table(found: Mapping[str, Any]) -> str:
    head = f"{'mode':<8}{'step s':>8}{'x off':>7}{'same':>7}{'rollout':>9}{'policy':>8}{'publish':>9}{'tokens/s':>10}"
    lines = [head + f"{'accept':>8}{'idle s':>8}{'reclaimed':>11}{'surprise':>10}{'rewards differ, p':>19}"]
    for mode, row in found["modes"].items():
        faster, same = (_or_dash(found[key].get(mode)) for key in ("speedup", "speedup_same_steps"))
        p = found["rewards_agree"].get(mode, {}).get("p", "-")
        lines.append(
            f"{mode:<8}{found['step_s'][mode]:>8.2f}{faster:>7}{same:>7}{row['rollout_s']:>9.2f}{row['policy_s']:>8.2f}"
            f"{row['publish_s']:>9.2f}{row['tokens_per_s']:>10.0f}{_or_dash(row['acceptance_length']):>8}"
            f"{row['idle_s']:>8.2f}{row['reclaimed_share']:>11.0%}{row['surprise_errors']:>10.1f}{p:>19}"
        )
    lines += [
        f"unfinished: seed {u['seed']} {u['mode']}, {u['steps']} steps: {u['error']}" for u in found["unfinished"]
    ]
    return "\n".join(lines)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def write(folder: Path, found: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "e2e.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "e2e.svg").write_text(draw_modes(found), encoding="utf-8")
