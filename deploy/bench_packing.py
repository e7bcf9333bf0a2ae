"""`longtail bench packing`: trained drafter tokens per second, sequences packed into rows against one padded row each.

Both ways train the same drafter on the same rollouts of one step of a run, with real lengths and real hidden states, in
batches of the same number of places (padding included): the padded way takes sequences as they come and fills each row
up to the longest of its batch.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

from deploy.bench_states import drafter_trainer, states_of, step_rollouts
from deploy.provenance import provenance
from services.config.schema import ClusterConfig
from services.drafter.packing import DraftRows, lay_rows
from services.drafter.trainer import DrafterTrainer
from services.models.hidden import HiddenStates, align
from services.models.packing import RowPlan, plan_rows

BUDGETS = (512, 1024, 2048, 4096)


def padded_rows(lengths: Sequence[int], budget: int) -> list[RowPlan]:
    """One sequence a row, in the given order; batches of at most `budget` places, a longer sequence by itself."""
    return [RowPlan(tuple((i,) for i in batch), max(lengths[i] for i in batch)) for batch in _batches(lengths, budget)]


def _batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for i, length in enumerate(lengths):
        if not length:
            continue
        width = max([length, *(lengths[j] for j in batch)])
        if batch and width * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


WAYS: dict[str, Callable[[Sequence[int], int], list[RowPlan]]] = {"packed": plan_rows, "padded": padded_rows}


def run_bench(config: ClusterConfig, repeats: int) -> dict[str, Any]:
    """Prints a line per batch size; `ratio` is that of the largest, where padding meets the most lengths."""
    torch.set_num_threads(config.drafter.threads)
    states = states_of(config, step_rollouts(config))
    random.Random(config.run.seed).shuffle(states)  # as they came: not by length
    trainer = drafter_trainer(config)
    cells = []
    for budget in BUDGETS:
        cells.append(_cell(trainer, states, budget, repeats))
        print(json.dumps(cells[-1]), flush=True)
    lengths = sorted(len(s.input_ids) for s in states)
    return {
        "bench": "packing",
        **provenance(),
        "threads": config.drafter.threads,
        "repeats": repeats,
        "sequences": len(states),
        "tokens": sum(lengths),
        "length_p50": lengths[len(lengths) // 2],
        "length_max": lengths[-1],
        "cells": cells,
        "ratio": cells[-1]["ratio"],
    }


def _cell(trainer: DrafterTrainer, states: Sequence[HiddenStates], budget: int, repeats: int) -> dict[str, Any]:
    aligned = [align(s) for s in states]
    lengths = [len(a.ids) for a in aligned]
    rows = {name: lay_rows(aligned, plan(lengths, budget), trainer.device) for name, plan in WAYS.items()}
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for repeat in range(repeats + 1):
        for name, batches in rows.items():
            rate = _rate(trainer, batches)
            if repeat:  # the first warms up
                rates[name].append(rate)
    cell: dict[str, Any] = {"places": budget}
    for name, batches in rows.items():
        tokens, found = sum(b.num_tokens for b in batches), rates[name]
        cell[name] = {
            "tokens_per_s": round(median(found), 1), "spread": [round(min(found), 1), round(max(found), 1)],
            "places_per_token": round(sum(b.ids.numel() for b in batches) / tokens, 3),
        }  # fmt: skip
    return cell | {"ratio": round(median(rates["packed"]) / median(rates["padded"]), 3)}


def _rate(trainer: DrafterTrainer, batches: Sequence[DraftRows]) -> float:
    """Tokens per second, an update per batch."""
    started = time.perf_counter()
    for batch in batches:
        trainer.train_rows([batch])
    return sum(b.num_tokens for b in batches) / (time.perf_counter() - started)
