"""What the benchmarks of drafter training share: a step's rollouts, their hidden states, and a trainer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from deploy.inputs import load_inputs
from deploy.warmup_rollouts import collect_states
from services.config.schema import ClusterConfig
from services.coordinator.work import make_work, prompts_of_step
from services.core.types import Rollout
from services.drafter.head import read_target_head
from services.drafter.state import initial_drafter_state
from services.drafter.trainer import DrafterTrainer
from services.models.device import pick_device
from services.models.files import model_dir, read_config, read_tensors
from services.models.hidden import HiddenStates
from services.models.layers import model_spec
from services.rollout.service import build_rollout_service
from services.speculation.strategy import OFF

EPOCH = 1


def drafter_trainer(config: ClusterConfig) -> DrafterTrainer:
    """With the model folder's head and drafter, as a run begins."""
    folder, device = model_dir(config.model.path), pick_device(config.model.device)
    spec = model_spec(read_config(folder))
    trainer = DrafterTrainer(spec, config.drafter, config.rollout.sampling.temperature, device)
    trainer.load_head(read_target_head(folder, spec, device))
    trainer.load_state(initial_drafter_state(config))
    return trainer


def states_of(config: ClusterConfig, rollouts: Sequence[Rollout], aux_layers: Sequence[int] = ()) -> list[HiddenStates]:
    """By the target's own forward pass, in the order of `rollouts`."""
    folder = model_dir(config.model.path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model = model.to(pick_device(config.model.device)).eval()
    return collect_states(model, rollouts, aux_layers, config.policy.micro_batch_tokens)


def step_rollouts(config: ClusterConfig, step: int = 1) -> list[Rollout]:
    """The rollouts of a run's step, without speculation, in the order in which they ended."""
    inputs, rollout = load_inputs(config), config.rollout
    prompts = prompts_of_step(inputs.train, step, rollout.prompts_per_step, config.run.seed)
    service = build_rollout_service(config, 0)
    service.open_epoch(EPOCH)
    tensors = read_tensors(model_dir(config.model.path))
    service.load_policy(0, tensors, EPOCH)
    service.set_strategy(OFF.name, EPOCH)
    service.submit(make_work(prompts, f"step{step:05d}", rollout.group_size, inputs.sampling, config.run.seed), EPOCH)
    found: list[Rollout] = []
    while len(found) < len(prompts) * rollout.group_size:
        found.extend(service.advance(rollout.advance_budget_s, EPOCH).finished)
    return found
