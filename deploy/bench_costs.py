"""`longtail bench costs`: what a round costs on the native engine of this machine, stage by stage, as a cost table.

The engine times itself as at a server's start (`services/rollout/calibrate.py`), only for longer, in the processor time
of its one thread on a CPU, so that other work on the machine does not count. `longtail bench selector` replays tables
like this one from deploy/costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from deploy.bench_selector import STRATEGIES
from deploy.provenance import provenance
from services.config.schema import ClusterConfig
from services.drafter.state import read_drafter
from services.models.device import pick_device
from services.models.files import model_dir, read_config, read_grown, read_tensors
from services.models.layers import model_spec
from services.models.methods import drafter_folder, drafter_method
from services.models.target import TargetModel
from services.rollout.calibrate import Limits, measure_costs
from services.rollout.native import EngineOptions, NativeEngine
from services.speculation.cost_table import CostPoint, CostTable
from services.speculation.selector import Fixed
from services.speculation.strategy import OFF, DraftStrategy
from services.speculation.suffix_index import SuffixIndex

MAX_RUNNING, MAX_LEN = 64, 896


def measured(
    config: ClusterConfig, strategies: Sequence[DraftStrategy], max_running: int, max_len: int, seconds: float
) -> list[CostPoint]:
    """Rounds of the native engine with the config's model and drafter, on this machine, one thread."""
    torch.set_num_threads(1)  # as a rollout server runs
    folder, device = model_dir(config.model.path), pick_device(config.model.device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    spec = model_spec(read_config(folder))
    nodes = max(s.num_draft_tokens for s in strategies)
    options = EngineOptions(max_running, max_len, nodes, suffix_index=SuffixIndex(10**5))
    target = TargetModel(spec, options.max_len + options.spare_columns, device, torch.float32)
    engine = NativeEngine(target, options, Fixed(OFF), lambda ids: "", clock)
    engine.load_policy(0, read_tensors(folder))
    method = drafter_method(config.drafter, spec)
    engine.load_drafter(0, read_drafter(drafter_folder(config), method))
    limits = Limits(max_running, max_len, spec.vocab_size, config.rollout.sampling.temperature)
    return measure_costs(engine, strategies, limits, clock, seconds)


def run_bench(config: ClusterConfig, seconds: float = 60.0, say: Callable[[str], None] = print) -> dict[str, Any]:
    points = measured(config, STRATEGIES, MAX_RUNNING, MAX_LEN, seconds)
    table = CostTable.fit(points)
    say(_text(points, table))
    return {
        "bench": "costs",
        **provenance(),
        "grown": read_grown(model_dir(config.model.path)),
        "threads": 1,
        "seconds": seconds,
        "spread": round(table.spread, 4),
        "terms": table.terms,
        "knots": table.knots,
        "points": [_point(p) for p in points],
    }


def _point(point: CostPoint) -> dict[str, Any]:
    """As in the files of deploy/costs."""
    strategy, stages = asdict(point.strategy), point.seconds
    assert not isinstance(stages, float)
    strategy.pop("name")
    return {
        "strategy": strategy,
        "running": point.view.running,
        "context_tokens": point.view.context_tokens,
        "behind_tokens": point.view.behind_tokens,
        "seconds": {stage: round(seconds, 7) for stage, seconds in asdict(stages).items()},
    }


def _text(points: Sequence[CostPoint], table: CostTable) -> str:
    lines = [f"{'strategy':<20}{'running':>8}{'context':>9}{'behind':>8}{'measured ms':>13}{'fitted ms':>11}"]
    for p in points:
        view, fitted = p.view, table.seconds(p.strategy, p.view).total
        sizes = f"{view.running:>8}{view.context_tokens:>9}{view.behind_tokens:>8}"
        lines.append(f"{p.strategy.name:<20}{sizes}{1e3 * p.total:>13.2f}{1e3 * fitted:>11.2f}")
    return "\n".join([*lines, f"root mean square of the fit's relative errors: {table.spread:.3f}"])
