"""Real step times and predicted ones side by side, for `longtail bench simulator`: by step and in means per run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

from deploy.e2e_runs import step_s
from services.core.types import StepMetrics

HEAD = (
    f"{'servers':>7} {'mode':<12}{'step':>5}{'rollout s':>10}{'predicted':>10}{'error':>7}{'step s':>8}"
    f"{'predicted':>10}{'error':>7}"
)
Row = dict[str, Any]
ABOUT = ("mode", "servers", "run", "fitted", "cost_error")  # in each row of a run; the last three: of a recorded one


def compared(
    mode: str,
    servers: int,
    real_steps: Sequence[StepMetrics],
    predicted: Sequence[StepMetrics],
    say: Callable[[str], None],
    **about: Any,
) -> list[Row]:
    """A row for each step, told as it is made. `about`: what else is known of the run, kept in its rows."""
    rows = list[Row]()
    for real, other in zip(real_steps, predicted, strict=True):
        rollout = real.rollout_s, other.rollout_s
        step = step_s(real), step_s(other)
        rows.append(
            {"servers": servers, "mode": mode, **about, "step": real.step, "rollout_s": round(rollout[0], 3),
             "rollout_predicted_s": round(rollout[1], 3), "rollout_error": round(rollout[1] / rollout[0] - 1, 4),
             "step_s": round(step[0], 3), "step_predicted_s": round(step[1], 3),
             "step_error": round(step[1] / step[0] - 1, 4), "idle_s": round(real.idle_s, 3),
             "idle_predicted_s": round(other.idle_s, 3)}
        )  # fmt: skip
        row = rows[-1]
        say(f"{servers:>7} {mode:<12}{real.step:>5}{rollout[0]:>10.2f}{rollout[1]:>10.2f}"
            f"{row['rollout_error']:>7.1%}{step[0]:>8.2f}{step[1]:>10.2f}{row['step_error']:>7.1%}")  # fmt: skip
    return rows


def by_run(rows: Sequence[Row]) -> list[Row]:
    """Means of each run's steps after the first, which warms up, and how far the prediction lies beside."""
    found = list[Row]()
    for key in dict.fromkeys(map(_run_of, rows)):
        steps = [r for r in rows if _run_of(r) == key]
        steps = steps[1:] or steps
        run: Row = {name: steps[0][name] for name in ABOUT if name in steps[0]}
        run["steps"] = len(steps)
        for what in ("rollout", "step"):
            real, other = (mean(r[f"{what}{kind}_s"] for r in steps) for kind in ("", "_predicted"))
            run |= {f"{what}_s": round(real, 3), f"{what}_predicted_s": round(other, 3)}
            run[f"{what}_error"] = round(other / real - 1, 4)
        found.append(run)
    return found


def _run_of(row: Row) -> tuple[Any, ...]:
    return row.get("run"), row["mode"], row["servers"]


def table(runs: Sequence[Row]) -> str:
    costs = f"{'costs':>8}" if any("run" in r for r in runs) else ""
    lines = [f"{'mode':<12}{'servers':>8}{'rollout s':>10}{'predicted':>10}{'error':>7}{'step s':>8}{'predicted':>10}"
             f"{'error':>7}{costs}   (means of the steps after the first)"]  # fmt: skip
    for r in runs:
        cells = "".join(
            f"{r[f'{what}_s']:>{width}.2f}{r[f'{what}_predicted_s']:>10.2f}{r[f'{what}_error']:>7.1%}"
            for what, width in (("rollout", 10), ("step", 8))
        )
        lines.append(f"{r['mode']:<12}{r['servers']:>8}{cells}{_recorded(r) if 'run' in r else ''}")
    return "\n".join(lines)


def _recorded(run: Row) -> str:
    costs = "-" if run["cost_error"] is None else f"{run['cost_error']:.1%}"
    return f"{costs:>8}   {run['run']}{', fitted' if run['fitted'] else ''}"


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Of the steps after the first, which warms up."""
    later = [r for r in rows if r["step"] > 1] or list(rows)
    return {
        f"{what}_error_{name}": round(figure([abs(r[f"{what}_error"]) for r in later]), 4)
        for what in ("rollout", "step")
        for name, figure in (("median", median), ("worst", max))
    }
