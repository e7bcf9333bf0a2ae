"""`longtail bench rollout`: how fast the native engine is, against transformers' own `generate` and with each strategy.

Work: groups of siblings, as in training. "equal" cells cut long problems at the same length; the "tail" cell lets short
and long problems run to their own end. All engines are interleaved within every repeat, the first repeat is dropped,
medians are told with their spread. Greedy output of every strategy is compared with OFF in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from deploy.provenance import provenance
from services.config.schema import ClusterConfig
from services.config.speculation import StrategyConfig
from services.core.errors import DataError
from services.core.types import AcceptanceStats, GroupWork, Prompt, Rollout, SamplingParams
from services.data.source import load_prompts
from services.drafter.state import read_drafter
from services.models.device import pick_device
from services.models.files import model_dir, read_config, read_grown, read_tensors
from services.models.layers import model_spec
from services.models.methods import drafter_folder, drafter_method
from services.models.target import TargetModel
from services.models.tokenizer import Tokenizer, load_tokenizer
from services.rollout.native import EngineOptions, NativeEngine
from services.speculation.selector import Fixed
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy
from services.speculation.suffix_index import SuffixIndex

STRATEGIES = tuple(
    draft_strategy(s)
    for s in (
        StrategyConfig(),
        StrategyConfig(drafter="eagle", depth=2, num_draft_tokens=3),
        StrategyConfig(drafter="eagle", depth=4, num_draft_tokens=5),
        StrategyConfig(drafter="eagle", depth=4, num_draft_tokens=5, sampled=False),
        StrategyConfig(drafter="eagle", depth=4, topk=2, num_draft_tokens=8),
        StrategyConfig(drafter="suffix", depth=4, num_draft_tokens=5),
        StrategyConfig(drafter="suffix", depth=8, num_draft_tokens=9),
    )
)
EQUAL_TOKENS, TAIL_TOKENS, LONG_TERMS = 96, 512, 14
TAIL_SHARE = 0.25  # the tail begins when at most this share of the batch still runs
GENERATE = "generate"


@dataclass(frozen=True)
class Workload:
    name: str
    groups: tuple[tuple[Prompt, int], ...]  # (prompt, siblings)
    max_tokens: int

    @property
    def batch(self) -> int:
        return sum(n for _, n in self.groups)


@dataclass(frozen=True)
class Run:
    tokens: int
    seconds: float
    tail_tokens: int
    tail_seconds: float
    acceptance_length: float | None


@dataclass(frozen=True)
class Cell:
    """Tokens per second: median over the repeats, with the lowest and highest."""

    workload: str
    batch: int
    strategy: str
    tokens_per_s: float
    lowest: float
    highest: float
    tail_tokens_per_s: float
    acceptance_length: float | None


class Bench:
    """Everything loaded once; a new engine per run, so that nothing is remembered between runs."""

    def __init__(self, config: ClusterConfig) -> None:
        torch.set_num_threads(1)  # as a rollout server runs
        self.folder, self.device = model_dir(config.model.path), pick_device(config.model.device)
        self.tokenizer: Tokenizer = load_tokenizer(config.model.path)
        self.tensors: dict[str, Tensor] = read_tensors(self.folder)
        self.spec = model_spec(read_config(self.folder))
        method = drafter_method(config.drafter, self.spec)
        self.drafter: dict[str, Tensor] = read_drafter(drafter_folder(config), method)
        self.hf = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).to(self.device).eval()
        self.heldout = load_prompts(config, self.tokenizer).heldout

    def sampling(self, max_tokens: int, temperature: float) -> SamplingParams:
        return SamplingParams(
            temperature=temperature, max_tokens=max_tokens, stop_token_ids=self.tokenizer.eos_token_ids
        )

    def engine(self, work: Workload, strategy: DraftStrategy) -> NativeEngine:
        longest = max(len(p.token_ids) for p, _ in work.groups) + work.max_tokens
        index = SuffixIndex(10**6) if strategy.searched else None
        options = EngineOptions(work.batch, longest, strategy.num_draft_tokens, suffix_index=index)
        target = TargetModel(self.spec, longest + options.spare_columns, self.device, torch.float32)
        engine = NativeEngine(target, options, Fixed(strategy), self.tokenizer.decode, time.monotonic)
        engine.load_policy(0, self.tensors)
        engine.load_drafter(0, self.drafter)
        return engine

    def run_engine(self, work: Workload, strategy: DraftStrategy, seed: int, temperature: float = 1.0) -> Run:
        return self.timed(work, strategy, seed, temperature)[0]

    def timed(
        self, work: Workload, strategy: DraftStrategy, seed: int, temperature: float
    ) -> tuple[Run, list[Rollout]]:
        engine, works = self.engine(work, strategy), []
        for g, (prompt, siblings) in enumerate(work.groups):
            indices = tuple(range(siblings))
            seeds = tuple(seed * 1_000_003 + 101 * g + i for i in indices)
            works.append(GroupWork(f"g{g}", prompt, indices, seeds, self.sampling(work.max_tokens, temperature)))
        engine.submit(works)
        rollouts: list[Rollout] = []
        start, tail_start, before_tail = time.perf_counter(), None, 0
        while engine.num_running or engine.num_waiting:
            rollouts.extend(engine.step())
            if tail_start is None and len(rollouts) >= work.batch * (1 - TAIL_SHARE):
                tail_start, before_tail = time.perf_counter(), _tokens(engine, rollouts)
        end, total = time.perf_counter(), _tokens(engine, rollouts)
        stats = AcceptanceStats.merged(r.acceptance for r in rollouts)
        tail_seconds = end - tail_start if tail_start else 0.0
        return Run(total, end - start, total - before_tail, tail_seconds, stats.acceptance_length), rollouts

    @torch.no_grad()
    def run_generate(self, work: Workload, seed: int) -> Run:
        """transformers' batched generate on the same prompts, left-padded, sampling at temperature 1."""
        torch.manual_seed(seed)
        rows = [list(p.token_ids) for p, n in work.groups for _ in range(n)]
        width, pad, eos = max(map(len, rows)), 0, list(self.tokenizer.eos_token_ids)
        ids = torch.tensor([[pad] * (width - len(r)) + r for r in rows], device=self.device)
        seen = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=self.device)
        options = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, max_new_tokens=work.max_tokens, use_cache=True, pad_token_id=pad,
            eos_token_id=eos,
        )  # fmt: skip
        start = time.perf_counter()
        out = self.hf.generate(ids, attention_mask=seen, generation_config=options)[:, width:].tolist()
        seconds = time.perf_counter() - start
        return Run(sum(_until(row, eos) for row in out), seconds, 0, 0.0, None)

    def greedy_mismatches(self, work: Workload) -> int:
        """Rollouts whose greedy ids differ from OFF's, over all strategies."""
        outputs = []
        for strategy in STRATEGIES:
            rollouts = self.timed(work, strategy, 0, temperature=0.0)[1]
            outputs.append({r.rollout_id: r.response_ids for r in rollouts})
        return sum(other[k] != outputs[0][k] for other in outputs[1:] for k in outputs[0])


def _tokens(engine: NativeEngine, finished: Sequence[Rollout]) -> int:
    return sum(len(r.response_ids) for r in finished) + sum(r.num_tokens for r in engine.running())


def _until(row: Sequence[int], eos: Sequence[int]) -> int:
    """Response tokens up to and with the end of sequence."""
    return next((i for i, token in enumerate(row, start=1) if token in eos), len(row))


def workloads(heldout: Sequence[Prompt]) -> tuple[Workload, ...]:
    """Equal length at batch 1, 4, 16, and a long-tailed batch of 16 (two long problems among short ones)."""
    long = [p for p in heldout if p.text.count(" + ") + p.text.count(" - ") >= LONG_TERMS]
    short = [p for p in heldout if p not in long]
    if len(long) < 2 or len(short) < 6:
        raise DataError(f"the bench needs 2 held-out problems of {LONG_TERMS} terms: raise data.source.size")
    longest = sorted(long, key=lambda p: -len(p.token_ids))[:1]
    tail = (*((p, 2) for p in short[:6]), *((p, 4) for p in longest))
    return (
        Workload("equal", ((long[0], 1),), EQUAL_TOKENS),
        Workload("equal", ((long[0], 4),), EQUAL_TOKENS),
        Workload("equal", ((long[0], 8), (long[1], 8)), EQUAL_TOKENS),
        Workload("tail", tail, TAIL_TOKENS),
    )


def run_bench(config: ClusterConfig, repeats: int = 5, say: Callable[[str], None] = print) -> dict[str, Any]:
    """All cells. The first repeat warms up and is dropped."""
    bench = Bench(config)
    cells: list[Cell] = []
    mismatches = 0
    for work in workloads(bench.heldout):
        runs: dict[str, list[Run]] = {name: [] for name in (GENERATE, *(s.name for s in STRATEGIES))}
        for repeat in range(repeats + 1):
            runs[GENERATE].append(bench.run_generate(work, repeat))
            for strategy in STRATEGIES:
                runs[strategy.name].append(bench.run_engine(work, strategy, repeat))
        cells += [_cell(work, name, found[1:]) for name, found in runs.items()]
        mismatches += bench.greedy_mismatches(work)
        say(_table(cells[-len(runs) :]))
    return {
        "bench": "rollout",
        **provenance(),
        "grown": read_grown(bench.folder),
        "threads": 1,
        "repeats": repeats,
        "greedy_mismatches": mismatches,
        "cells": [asdict(c) for c in cells],
        **_verdict(cells),
    }


def _cell(work: Workload, name: str, runs: Sequence[Run]) -> Cell:
    rates = [r.tokens / r.seconds for r in runs]
    tails = [r.tail_tokens / r.tail_seconds for r in runs if r.tail_seconds > 0]
    lengths = [r.acceptance_length for r in runs if r.acceptance_length is not None]
    return Cell(
        work.name, work.batch, name, round(median(rates), 1), round(min(rates), 1), round(max(rates), 1),
        round(median(tails), 1) if tails else 0.0, round(median(lengths), 3) if lengths else None,
    )  # fmt: skip


def _verdict(cells: Sequence[Cell]) -> Mapping[str, Any]:
    by = {(c.workload, c.batch, c.strategy): c for c in cells}
    ratios = [c.tokens_per_s / by[c.workload, c.batch, GENERATE].tokens_per_s for c in cells if c.strategy == OFF.name]
    tail = [c for c in cells if c.workload == "tail" and c.strategy != GENERATE]
    off = next(c for c in tail if c.strategy == OFF.name)
    best = max((c for c in tail if c.strategy != OFF.name), key=lambda c: c.tail_tokens_per_s)
    return {
        "off_vs_generate_min": round(min(ratios), 3),
        "tail_strategy": best.strategy,
        "tail_speedup": round(best.tail_tokens_per_s / off.tail_tokens_per_s, 3),
        "tail_batch_speedup": round(best.tokens_per_s / off.tokens_per_s, 3),
    }


def _table(cells: Sequence[Cell]) -> str:
    lines = [f"{f'{cells[0].workload} x {cells[0].batch}':<20} tokens/s     low    high    tail  acceptance"]
    for c in cells:
        length = "-" if c.acceptance_length is None else f"{c.acceptance_length:.2f}"
        rates = f"{c.tokens_per_s:>8.0f}{c.lowest:>8.0f}{c.highest:>8.0f}{c.tail_tokens_per_s:>8.0f}"
        lines.append(f"{c.strategy:<21}{rates}{length:>12}")
    return "\n".join(lines)
