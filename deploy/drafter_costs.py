"""What rounds cost with a drafter: recorded, or timed here; and how fast they really are at a batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from deploy.drafter_eval import SUFFIX, Costs
from deploy.drafter_judge import Judge, Recorded, Requests
from deploy.replay import COSTS, read_costs
from services.config.speculation import eagle_chain
from services.core.errors import ConfigError
from services.models.drafter import Drafter
from services.models.eagle import Eagle
from services.rollout.calibrate import Limits, measure_costs
from services.speculation.cost_table import CostTable
from services.speculation.round import RoundOutcome
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

MEASURE_S = 8.0
REPEATS = 3


def costs_of(name: str | None, judge: Judge, depth: int, batches: Sequence[int], context: float) -> Costs:
    """Recorded ones by name or file; None: timed on this machine with the target, in the processor time of one thread
    on a CPU. Raises ConfigError for a name that nobody recorded."""
    if name is None:
        return _timed(judge, depth, batches, context)
    path = Path(name)
    folder, stem = (path.parent, path.stem) if path.suffix == ".json" else (COSTS, name)
    if not (folder / f"{stem}.json").is_file():
        known = ", ".join(sorted(file.stem for file in COSTS.glob("*.json")))
        raise ConfigError(f"--costs {name}: no such file; recorded are {known}")
    return Costs(read_costs(stem, folder).table, f"recorded, {stem}", context)


def _timed(judge: Judge, depth: int, batches: Sequence[int], context: float) -> Costs:
    """Of chains up to `depth` and the suffix index. What a round costs does not depend on the drafter's numbers."""
    chains = sorted({1, depth, (1 + depth) // 2})
    strategies = (OFF, *(draft_strategy(eagle_chain(d)) for d in chains), SUFFIX)
    max_len = max(64, round(3 * context))
    engine = judge.engine(max(batches), max_len, strategies, Recorded(OFF))
    engine.load_drafter(0, _any_drafter(judge))
    limits = Limits(max(batches), max_len, judge.spec.vocab_size, 1.0)
    table = CostTable.fit(measure_costs(engine, strategies, limits, judge.clock, MEASURE_S))
    source = f"timed here for {MEASURE_S:g} s, the fit is off by {table.spread:.0%}"
    return Costs(table, source, context)


def _any_drafter(judge: Judge) -> Mapping[str, Tensor]:
    drafter = Drafter(Eagle(judge.spec))
    drafter.reset(torch.Generator().manual_seed(0))
    return {name: tensor.detach() for name, tensor in drafter.tensors().items()}


def timed_speedup(
    judge: Judge, tensors: Mapping[str, Tensor], strategy: DraftStrategy, requests: Requests, temperature: float
) -> float | None:
    """Tokens per second of rounds with a full batch, over those without drafts: the median of repeats, both interleaved
    in each. None where the batch was never full."""
    ratios = []
    for repeat in range(REPEATS):
        asked = Requests(requests.prompts, requests.siblings, requests.max_tokens, requests.running, repeat)
        rates = [
            tokens_per_second(judge.generate(one, asked, temperature, own)[1], requests.running)
            for one, own in ((OFF, None), (strategy, tensors))
        ]
        if None in rates:
            return None
        ratios.append(rates[1] / rates[0])  # type: ignore[operator]
    return median(ratios)


def tokens_per_second(outcomes: Sequence[RoundOutcome], running: int) -> float | None:
    """Of rounds with so many requests; None without any."""
    full = [o for o in outcomes if o.view.running == running]
    seconds = sum(o.seconds.total for o in full)
    return sum(o.tokens for o in full) / seconds if seconds else None
