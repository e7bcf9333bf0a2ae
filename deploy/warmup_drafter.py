"""Second stage of the warm-up: a short start for a drafter on the target's own responses. It is left far from finished
on purpose: in the run it learns in the idle time of the tail."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from deploy.warmup_card import DrafterResult
from deploy.warmup_rollouts import WarmupRollouts, collect_states, published
from services.config.schema import ClusterConfig
from services.drafter.export import write_drafter_folder
from services.drafter.head import target_head
from services.drafter.state import fresh_state
from services.drafter.trainer import DrafterTrainer
from services.models.device import pick_dtype
from services.models.drafter import Drafter
from services.models.files import read_config
from services.models.hidden import HiddenStates
from services.models.layers import model_spec

TELL_EVERY = 10


def warm_drafter(
    model: PreTrainedModel,
    method: Literal["eagle", "eagle3"],
    rollouts: WarmupRollouts,
    config: ClusterConfig,
    rng: Random,
    folders: tuple[Path, Path],
    say: Callable[[str], None],
) -> DrafterResult:
    """Train on `rollouts.training`, then estimate acceptance on a quarter of the held-out responses. `folders`: the
    target's, and where the drafter goes."""
    started = time.monotonic()
    target_config = read_config(folders[0])
    trainer = _fresh_trainer(model, method, config)
    aux_layers, budget = trainer.method.aux_layers, config.warmup.micro_batch_tokens
    states = collect_states(model, rollouts.training, aux_layers, budget)
    for step in range(1, config.warmup.drafter_steps + 1):
        micro = trainer.train_micro_step(_fill(states, config.drafter.pack_tokens, rng))
        if step % TELL_EVERY == 0:
            overlap = " ".join(f"{a:.2f}" for a in micro.expected_acceptance)
            say(f"{method} step {step}/{config.warmup.drafter_steps}  loss {micro.loss:.3f}  overlap {overlap}")
    unseen = collect_states(model, rollouts.sampled[: config.warmup.eval_prompts // 4], aux_layers, budget)
    state = trainer.state()
    estimate = trainer.estimate("warm start", state["tensors"], unseen)
    tensors = {name: t.to(pick_dtype(config.model.dtype)) for name, t in state["tensors"].items()}
    write_drafter_folder(tensors, trainer.method, target_config, folders[1], state["total_steps"])
    count = sum(t.numel() for t in tensors.values())
    return DrafterResult(method, count, estimate.acceptance_length, time.monotonic() - started)


def _fresh_trainer(model: PreTrainedModel, method: Literal["eagle", "eagle3"], config: ClusterConfig) -> DrafterTrainer:
    changes: dict[str, Any] = {"learning_rate": config.warmup.drafter_learning_rate, "method": method}
    if method != config.drafter.method:
        changes["aux_layers"] = ()  # those of the configured method
    spec = model_spec(model.config.to_dict())
    trainer = DrafterTrainer(spec, config.drafter.model_copy(update=changes), 1.0, model.device)
    trainer.load_head(target_head(published(model), spec, 0, model.device))
    network = Drafter(trainer.method)
    network.reset(torch.Generator().manual_seed(config.run.seed))
    trainer.load_state(fresh_state(network.tensors(), trainer.method))
    return trainer


def _fill(states: Sequence[HiddenStates], tokens: int, rng: Random) -> list[HiddenStates]:
    picked: list[HiddenStates] = []
    while tokens > 0:
        picked.append(rng.choice(states))
        tokens -= len(picked[-1].input_ids)
    return picked
