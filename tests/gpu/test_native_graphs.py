"""The native engine with and without CUDA graphs of the target's pass: the same output, its cost and gain.

Random weights: what is asked is whether the two agree, and how long a pass takes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from services.config.graphs import GraphsConfig
from services.config.speculation import StrategyConfig, eagle_chain
from services.core.types import GroupWork, Prompt, SamplingParams
from services.models.device import pick_device
from services.models.layers import ModelSpec
from services.models.target import TargetModel, target_names
from services.rollout.captured import PassInputs, target_pass
from services.rollout.graphs import LEAST_COLUMNS
from services.rollout.native import EngineOptions, NativeEngine
from services.speculation.selector import Fixed
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy
from tests.services.models.tiny import random_drafter

NEEDS_MODEL = False
SMALL = ModelSpec(
    "qwen2", 256, 512, 3, 8, 2, 32, 512, 1e-6, False, True, False, {"rope_type": "default", "rope_theta": 1e4}, 4096
)
LARGE = dataclasses.replace(
    SMALL, hidden_size=2048, intermediate_size=8192, num_layers=28, num_heads=16, head_dim=128, vocab_size=32768
)
TREE = draft_strategy(StrategyConfig(drafter="eagle", depth=3, topk=2, num_draft_tokens=8))
STRATEGIES = (OFF, draft_strategy(eagle_chain(3, True)), TREE)
REPEATS = 5


def weights(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def one(shape: tuple[int, ...]) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device="cuda")
        return drawn / shape[-1] ** 0.5 if len(shape) == 2 else 1 + drawn / 10

    return {name: one(shape).to(torch.bfloat16) for name, shape in target_names(spec).items()}


def engine_of(
    spec: ModelSpec, dtype: torch.dtype, tensors: dict[str, Tensor], strategy: DraftStrategy, graphs: bool
) -> NativeEngine:
    device = pick_device("cuda")
    nodes = tuple(s.num_draft_tokens for s in STRATEGIES)
    config = GraphsConfig() if graphs else None
    options = EngineOptions(8, 600, max(nodes), graphs=config, graph_nodes=nodes)
    target = TargetModel(spec, options.max_len + options.spare_columns, device, dtype)
    engine = NativeEngine(target, options, Fixed(strategy), lambda ids: "", time.monotonic)
    engine.load_policy(0, tensors)
    engine.load_drafter(0, random_drafter(spec))
    return engine


def work(name: str, batch: int, sampling: SamplingParams, shortest: int = 20) -> list[GroupWork]:
    ids = [tuple((7 * n + k) % 500 for k in range(shortest + 3 * n)) for n in range(batch)]
    return [GroupWork(f"{name}{n}", Prompt(str(n), "", p, "", "t"), (0,), (n,), sampling) for n, p in enumerate(ids)]


def run(engine: NativeEngine, works: list[GroupWork]) -> dict[str, tuple[int, ...]]:
    engine.submit(works)
    found = {}
    while engine.num_running or engine.num_waiting:
        found.update({r.group_id: tuple(r.response_ids) for r in engine.step()})
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_output_is_equal_with_and_without_graphs(strategy: DraftStrategy, temperature: float) -> None:
    """In float64, where rounding moves no draw, across a size of columns, and with a second policy version, which the
    captured graphs must follow."""
    first = {n: t.double() for n, t in weights(SMALL).items()}
    second = {n: t.flip(0) for n, t in first.items()}
    sampling = SamplingParams(temperature=temperature, max_tokens=80)
    plain, captured = (engine_of(SMALL, torch.float64, first, strategy, graphs) for graphs in (False, True))
    for version, tensors in enumerate((first, second)):
        for engine in (plain, captured):
            engine.load_policy(version, tensors)
        works = work(f"v{version}-", 5, sampling, shortest=LEAST_COLUMNS - 60)
        assert run(plain, works) == run(captured, works)
    graphs = captured.graphs
    assert graphs is not None and graphs.replayed > 40 and sum(part.count for part in graphs.parts()) > 1


class Compared:
    """Graphs whose every pass runs again without one. Both write the same columns: the second run leaves its own."""

    def __init__(self, engine: NativeEngine) -> None:
        assert engine.graphs is not None
        self._rows, self._graphs = engine._rows, engine.graphs
        self.distances: list[float] = []
        self.capture_due = engine.graphs.capture_due

    def run(self, given: PassInputs, context: int) -> Tensor | None:
        out = self._graphs.run(given, context)
        if out is None:
            return None
        replayed = out.clone()
        plain = target_pass(self._rows, given, context + given.ids.shape[1])
        self.distances.append(float((replayed.float() - plain.float()).norm() / plain.float().norm()))
        return plain


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_a_replayed_pass_is_the_plain_one_in_bfloat16(strategy: DraftStrategy) -> None:
    engine = engine_of(SMALL, torch.bfloat16, weights(SMALL), strategy, graphs=True)
    engine.graphs = compared = Compared(engine)  # type: ignore[assignment]
    run(engine, work("bf16-", 5, SamplingParams(temperature=1.0, max_tokens=80), shortest=LEAST_COLUMNS - 60))
    assert len(compared.distances) > 40 and max(compared.distances) < 0.03, max(compared.distances)


def seconds_per_token(engine: NativeEngine, batch: int, strategy: DraftStrategy, repeat: int) -> float:
    works = work(f"{strategy.name}-{batch}-{repeat}-", batch, SamplingParams(max_tokens=120))
    engine.force_strategy(strategy)
    engine.submit(works)
    engine.step()  # prefills
    tokens = engine.num_tokens
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    while engine.num_running == batch and engine.num_tokens < batch * 50:
        engine.step()
    torch.cuda.synchronize()
    spent = (time.perf_counter() - began_s) / (engine.num_tokens - tokens)
    engine.abort()
    return spent


def test_tokens_per_second_and_memory(save: Callable[[str, dict[str, Any]], None]) -> None:
    """A 2 B shape in bfloat16; the two engines take turns. With a drafter of random weights, drafting itself gains
    nothing: compare graphs with none, not strategies with one another."""
    tensors = weights(LARGE)
    engines = {graphs: engine_of(LARGE, torch.bfloat16, tensors, OFF, graphs) for graphs in (False, True)}
    cells = []
    for batch in (1, 8):
        for strategy in STRATEGIES:
            found: dict[bool, list[float]] = {False: [], True: []}
            for repeat in range(REPEATS + 1):  # the first one captures
                for graphs, engine in sorted(engines.items(), reverse=repeat % 2 == 1):
                    found[graphs].append(seconds_per_token(engine, batch, strategy, repeat))
            rates = {graphs: sorted(1 / s for s in spent[1:]) for graphs, spent in found.items()}
            cells.append(
                {
                    "batch": batch,
                    "strategy": strategy.name,
                    "tokens_per_s": {"plain": median(rates[False]), "graphs": median(rates[True])},
                    "spread": {
                        "plain": [rates[False][0], rates[False][-1]],
                        "graphs": [rates[True][0], rates[True][-1]],
                    },
                    "ratio": median(rates[True]) / median(rates[False]),
                }
            )
    graphs = engines[True].graphs
    assert graphs is not None
    parts = [dataclasses.asdict(part) for part in graphs.parts()]
    save("native_graphs", {"model": dataclasses.asdict(LARGE), "dtype": "bfloat16", "cells": cells, "graphs": parts})
    assert {part["nodes"] for part in parts} == {s.num_draft_tokens for s in STRATEGIES}
    assert all(cell["ratio"] > 0.9 for cell in cells), cells
