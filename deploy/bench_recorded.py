"""`longtail bench simulator --from ... --runs ...`: recorded runs against the simulator, anywhere and at any time.

What rounds cost and how long everything else takes is read from runs of one strategy each (`--from`), which may have
run on GPUs that this machine does not have; each run of `--runs` is then simulated with its own configuration, lengths,
prompts and acceptance (`recorded.py` and `rerun.py` in services/simulator say what is read where). A run that is in
both is told as fitted: how well the costs describe what they were read from, and no prediction. The last column says by
how much the costs alone would miss a run of one strategy, given its own rounds: there the machine, or the costs' form,
was another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from deploy.provenance import provenance
from deploy.simulator_table import HEAD, by_run, compared, summary, table
from services.simulator.recorded import basis_of, check_alike, cost_error, most_at_once
from services.simulator.rerun import predicted
from services.simulator.run_record import read_run
from services.speculation.cost_table import CostPoint

BEYOND = 1.25  # times as many requests at once as were seen: from there on costs are told to be a guess


def run_recorded(
    sources: Sequence[Path], folders: Sequence[Path], say: Callable[[str], None] = print
) -> dict[str, Any]:
    """`sources`: run folders to read costs from; `folders`: those to predict. Raises DataError when one cannot be used
    for what it is named for."""
    known = {folder.resolve(): read_run(folder) for folder in dict.fromkeys((*sources, *folders))}
    check_alike(list(known.values()))
    if len(models := {run.config.model.path for run in known.values()}) > 1:
        say(f"models of {', '.join(sorted(models))}: taken to be of one shape")
    read = [known[folder] for folder in dict.fromkeys(f.resolve() for f in sources)]
    basis = basis_of(read)
    say(f"costs from {len(basis.points)} stretches of {basis.used} of {basis.seen} servers' steps; root mean square of "
        f"the fit's relative errors: {basis.table.spread:.3f}")  # fmt: skip
    wanted = [known[folder] for folder in dict.fromkeys(f.resolve() for f in folders)]
    for run in wanted:
        if most_at_once(run) > BEYOND * basis.most:
            say(f"{run.name} runs up to {most_at_once(run)} requests at once; what so many cost is a guess, seen were "
                f"up to {basis.most}: name a run with as many in --from")  # fmt: skip
    say(HEAD)
    rows = list[dict[str, Any]]()
    for run in wanted:
        costs = cost_error(run, basis)
        about = {
            "run": run.name,
            "fitted": any(run is other for other in read),
            "cost_error": None if costs is None else round(costs, 4),
        }
        real = [step.metrics for step in run.steps]
        rows += compared(run.mode, run.config.rollout.num_servers, real, predicted(run, basis), say, **about)
    runs = by_run(rows)
    say(table(runs))
    told = [r for r in rows if not r["fitted"]] or rows
    return {
        "bench": "simulator",
        **provenance(),
        **summary(told),
        "from": [run.name for run in read],
        "cost_spread": round(basis.table.spread, 4),
        "points": [_point(p) for p in basis.points],
        "prefill_tokens_per_s": {name: round(rate, 1) for name, rate in basis.prefill.items() if isfinite(rate)},
        "runs": runs,
        "rows": rows,
    }


def _point(point: CostPoint) -> dict[str, Any]:
    view = point.view
    return {
        "strategy": point.strategy.name,
        "running": view.running,
        "context_tokens": view.context_tokens,
        "seconds": round(point.total, 7),
    }
