"""`longtail bench losses`: what each drafter loss buys in the same time, from the same drafter and hidden states.

All ways learn from the rollouts of a run's first step and take turns of TURN_S seconds, so that whatever else the
machine does meets all of them alike; on a CPU the seconds are the process's own, which a shared machine stretches less.
The figures come from the second step's rollouts: the expected acceptance length, and what the native engine accepts of
drafts sampled from each drafter on held-out problems. `untrained` starts at random weights, `served` at the drafter
that ships with the model.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from deploy.bench_rollout import Bench, Workload
from deploy.bench_states import drafter_trainer, states_of, step_rollouts
from deploy.provenance import provenance
from services.config.drafter import DrafterConfig
from services.config.schema import ClusterConfig
from services.config.speculation import StrategyConfig
from services.drafter.buffer import HiddenStateBuffer
from services.drafter.state import DrafterState, fresh_state
from services.drafter.trainer import DrafterTrainer
from services.models.drafter import Drafter
from services.models.hidden import HiddenStates
from services.speculation.strategy import DraftStrategy, draft_strategy

STARTS = ("untrained", "served")


@dataclass(frozen=True)
class Way:
    """`features`: with the configured feature_weight, else 0. `mixed`: with the configured acceptance_ce_weight."""

    loss: Literal["cross_entropy", "total_variation", "acceptance_likelihood"]
    features: bool = True
    mixed: bool = False

    def section(self, drafter: DrafterConfig) -> DrafterConfig:
        changes = {
            "loss": self.loss,
            "feature_weight": drafter.feature_weight if self.features else 0.0,
            "acceptance_ce_weight": drafter.acceptance_ce_weight if self.mixed else 0.0,
        }
        return drafter.model_copy(update=changes)


WAYS = (
    Way("cross_entropy"),
    Way("cross_entropy", features=False),
    Way("total_variation"),
    Way("total_variation", mixed=True),
    Way("total_variation", features=False, mixed=True),
    Way("acceptance_likelihood"),
    Way("acceptance_likelihood", mixed=True),
)
TURN_S = 0.5
PROMPTS, SIBLINGS, MAX_TOKENS = 24, 2, 128  # of the engine's look at a drafter


@dataclass
class Course:
    """One way to train, and what it did so far."""

    way: Way
    trainer: DrafterTrainer
    seconds: float = 0.0
    num_tokens: int = 0

    def train(self, buffer: HiddenStateBuffer, seed: int, seconds: float) -> None:
        """Micro-steps for `seconds`. Draws belong to the micro-step, so all ways see the same sequences in turn."""
        clock = time.process_time if self.trainer.device.type == "cpu" else time.perf_counter
        started, pack = clock(), self.trainer.config.pack_tokens
        spent = 0.0
        while spent < seconds:
            states = buffer.sample(pack, random.Random(f"losses {seed} {self.trainer.total_steps}"))
            self.num_tokens += self.trainer.train_micro_step(states).num_tokens
            spent = clock() - started
        self.seconds += spent


@dataclass
class Judge:
    """Looks at drafters on what none of them learned from."""

    config: ClusterConfig
    heldout: Sequence[HiddenStates]
    bench: Bench = field(init=False)

    def __post_init__(self) -> None:
        self.bench = Bench(self.config)

    def figures(self, trainer: DrafterTrainer) -> dict[str, Any]:
        """`engine`: the acceptance length of a sampled chain in the native engine on held-out problems."""
        tensors = trainer.state()["tensors"]
        expected = trainer.estimate("heldout", tensors, self.heldout)
        return {
            "acceptance_length": round(expected.acceptance_length, 4),
            "per_depth": [round(a, 4) for a in expected.per_depth],
            "engine": round(self._engine(tensors), 4),
        }

    def _engine(self, tensors: dict[str, Tensor]) -> float:
        prompts = self.bench.heldout[:PROMPTS]
        work = Workload("heldout", tuple((p, SIBLINGS) for p in prompts), MAX_TOKENS)
        self.bench.drafter = tensors
        temperature = self.config.rollout.sampling.temperature
        length = self.bench.run_engine(work, _chain(self.config), self.config.run.seed, temperature).acceptance_length
        assert length is not None  # no response is shorter than a round
        return length


def _chain(config: ClusterConfig) -> DraftStrategy:
    depth, method = config.drafter.unroll, config.drafter.method
    return draft_strategy(StrategyConfig(drafter=method, depth=depth, num_draft_tokens=depth + 1, sampled=True))


def run_bench(config: ClusterConfig, seconds: float) -> dict[str, Any]:
    """Prints a line per start and way; each way trains for `seconds` seconds."""
    torch.set_num_threads(config.drafter.threads)
    first = drafter_trainer(config)
    training, heldout = (states_of(config, step_rollouts(config, n), first.method.aux_layers) for n in (1, 2))
    buffer = HiddenStateBuffer(sum(s.num_bytes for s in training))
    buffer.add(training)
    judge = Judge(config, heldout)
    cells = [cell for start in STARTS for cell in _compare(judge, buffer, start, seconds)]
    return {
        "bench": "losses",
        **provenance(),
        "threads": config.drafter.threads,
        "seconds": seconds,
        "seed": config.run.seed,
        "unroll": config.drafter.unroll,
        "pack_tokens": config.drafter.pack_tokens,
        "learning_rate": config.drafter.learning_rate,
        "feature_weight": config.drafter.feature_weight,
        "acceptance_ce_weight": config.drafter.acceptance_ce_weight,
        "training_tokens": sum(len(s.input_ids) for s in training),
        "heldout_tokens": sum(len(s.input_ids) for s in heldout),
        "cells": cells,
    }


def _compare(judge: Judge, buffer: HiddenStateBuffer, start: str, seconds: float) -> list[dict[str, Any]]:
    config = judge.config
    courses = [_course(config, start, way) for way in WAYS]
    cells: list[dict[str, Any]] = [
        {"start": start, "loss": None, "features": False, "mixed": False, **judge.figures(courses[0].trainer)}
    ]
    print(json.dumps(cells[0]), flush=True)
    while courses[0].seconds < seconds:
        for course in courses:
            course.train(buffer, config.run.seed, min(TURN_S, seconds - course.seconds))
    for course in courses:
        cell = {"start": start, **asdict(course.way), **judge.figures(course.trainer)}
        cell |= {
            "micro_steps": course.trainer.total_steps,
            "tokens_per_s": round(course.num_tokens / course.seconds, 1),
        }
        print(json.dumps(cell), flush=True)
        cells.append(cell)
    return cells


def _course(config: ClusterConfig, start: str, way: Way) -> Course:
    trainer = drafter_trainer(config.model_copy(update={"drafter": way.section(config.drafter)}))
    if start == "untrained":
        trainer.load_state(_untrained(trainer, config.run.seed))
    return Course(way, trainer)


def _untrained(trainer: DrafterTrainer, seed: int) -> DrafterState:
    network = Drafter(trainer.method)
    network.reset(torch.Generator().manual_seed(seed))
    return fresh_state(network.tensors(), trainer.method)
