"""`longtail bench acceptance`: how many tokens a verify step commits, by how drafts are made and by temperature.

Groups of siblings on held-out prompts, the same prompts and seeds for every cell, responses to their own end. Two
epochs: in the second the suffix index knows the responses of the first. Acceptance is counted, not timed, so it does
not depend on the machine; tokens per second are CPU time where the engine runs on a CPU, and OFF is their baseline.
Mean response length and reward stand beside them: they agree with OFF's within chance whatever drafts, since every
strategy draws from the target's own distribution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

import torch

from deploy.bench_rollout import Bench
from deploy.provenance import provenance
from services.config.schema import ClusterConfig
from services.config.schema import NativeEngine as NativeEngineConfig
from services.config.speculation import StrategyConfig, eagle_chain
from services.core.errors import ConfigError
from services.core.types import AcceptanceStats, GroupWork, Prompt, Rollout
from services.models.files import read_grown
from services.models.target import TargetModel
from services.rollout.native import EngineOptions, NativeEngine
from services.speculation.selector import Fixed
from services.speculation.strategy import DraftStrategy, draft_strategy
from services.speculation.suffix_index import SuffixIndex

TEMPERATURES = (0.0, 0.6, 0.9, 1.0)
EPOCHS = 2
STRATEGIES = tuple(
    draft_strategy(s)
    for s in (
        StrategyConfig(),
        *(eagle_chain(4, sampled) for sampled in (True, False)),
        *(StrategyConfig(drafter="eagle", depth=4, topk=2, num_draft_tokens=8, sampled=s) for s in (True, False)),
        StrategyConfig(drafter="suffix", depth=8, num_draft_tokens=9),
        StrategyConfig(drafter="hybrid", depth=2, num_draft_tokens=9),
    )
)


@dataclass(frozen=True)
class Cell:
    """`tokens_per_step`: over all decode steps, also those without a draft; `acceptance_length`: over those with one.
    `tokens`: mean response length, with its standard error."""

    strategy: str
    temperature: float
    epoch: int
    acceptance_length: float | None
    tokens_per_step: float
    acceptance_rate: float | None
    tokens_per_s: float
    tokens: float
    tokens_error: float


def run_bench(config: ClusterConfig, groups: int, siblings: int, running: int) -> dict[str, Any]:
    """Prints a table per temperature."""
    if not isinstance(config.rollout.engine, NativeEngineConfig):
        raise ConfigError("bench acceptance measures the native engine: set rollout.engine.type: native")
    bench = Bench(config)
    prompts = bench.heldout[:groups]
    limit = config.rollout.sampling.max_tokens
    cells = []
    for temperature in TEMPERATURES:
        for strategy in STRATEGIES:
            cells += measure(bench, strategy, prompts, (siblings, running, limit), temperature)
        print(table(temperature, [c for c in cells if c.temperature == temperature]), flush=True)
    return {
        "bench": "acceptance",
        **provenance(),
        "grown": read_grown(bench.folder),
        "engine": "native",
        "groups": len(prompts),
        "siblings": siblings,
        "batch": running,
        "max_tokens": limit,
        "cells": [asdict(c) for c in cells],
    }


def measure(
    bench: Bench, strategy: DraftStrategy, prompts: Sequence[Prompt], sizes: tuple[int, int, int], temperature: float
) -> Iterator[Cell]:
    """`sizes`: siblings, most requests at a time, most tokens."""
    siblings, running, limit = sizes
    clock: Callable[[], float] = time.process_time if bench.device.type == "cpu" else time.perf_counter
    longest = max(len(p.token_ids) for p in prompts) + limit
    index = SuffixIndex(10**6) if strategy.searched else None
    options = EngineOptions(max(running, siblings), longest, strategy.num_draft_tokens, suffix_index=index)
    target = TargetModel(bench.spec, longest + options.spare_columns, bench.device, torch.float32)
    engine = NativeEngine(target, options, Fixed(strategy), bench.tokenizer.decode, clock)
    engine.load_policy(0, bench.tensors)
    engine.load_drafter(0, bench.drafter)
    for epoch in range(EPOCHS):
        works = []
        for g, prompt in enumerate(prompts):
            seeds = tuple(1_000_003 * epoch + 101 * g + i for i in range(siblings))
            sampling = bench.sampling(limit, temperature)
            works.append(GroupWork(f"e{epoch}g{g}", prompt, tuple(range(siblings)), seeds, sampling))
        engine.submit(works)
        started, rollouts = clock(), list[Rollout]()
        while engine.num_running or engine.num_waiting:
            rollouts += engine.step()
        yield cell(strategy, temperature, epoch + 1, rollouts, clock() - started)


def cell(strategy: DraftStrategy, temperature: float, epoch: int, rollouts: Sequence[Rollout], seconds: float) -> Cell:
    stats = AcceptanceStats.merged(r.acceptance for r in rollouts)
    lengths = [len(r.response_ids) for r in rollouts]
    steps = sum(stats.steps_by_strategy.values())
    accepted = stats.num_accepted_tokens
    return Cell(
        strategy=strategy.name,
        temperature=temperature,
        epoch=epoch,
        acceptance_length=None if stats.acceptance_length is None else round(stats.acceptance_length, 3),
        tokens_per_step=round(sum(lengths) / steps, 3),
        acceptance_rate=round(accepted / stats.proposed, 3) if stats.proposed else None,
        tokens_per_s=round(sum(lengths) / seconds, 1),
        tokens=round(fmean(lengths), 1),
        tokens_error=round(stdev(lengths) / math.sqrt(len(lengths)), 1) if len(lengths) > 1 else 0.0,
    )


def table(temperature: float, cells: Sequence[Cell]) -> str:
    """Epochs side by side."""
    lines = [f"temperature {temperature:<8} acceptance length   tokens per step   tokens/s        response tokens"]
    for name in dict.fromkeys(c.strategy for c in cells):
        found = [c for c in cells if c.strategy == name]
        lengths = [f"{c.acceptance_length:>8.2f}" if c.acceptance_length else f"{'-':>8}" for c in found]
        lines.append(
            f"{name:<22}{''.join(lengths)}  {''.join(f'{c.tokens_per_step:>8.2f}' for c in found)}"
            f"{''.join(f'{c.tokens_per_s:>8.0f}' for c in found)}"
            f"{''.join(f'{c.tokens:>7.1f}±{c.tokens_error:<4.1f}' for c in found)}"
        )
    return "\n".join(lines)
