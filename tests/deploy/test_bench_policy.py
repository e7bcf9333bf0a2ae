from __future__ import annotations

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deploy.bench_policy import Workload, made_up, matmul_parameters, run_bench, training_flops
from deploy.cli_shared import config_of
from services.models.files import model_dir, read_config
from services.models.layers import model_spec
from services.policy.service import load_policy_model

POCKET = model_spec(read_config(model_dir("pocket")))


def test_the_operations_are_those_that_torch_counts() -> None:
    """On one row, forward and backward. Torch counts attention without regard to the causal mask."""
    model, length = load_policy_model("pocket", torch.device("cpu")), 48
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counted:
        model(torch.arange(length)[None]).logits.sum().backward()
    attention = 12 * POCKET.num_layers * POCKET.qkv_sizes[0] * length**2
    assert counted.get_total_flops() == pytest.approx(6 * matmul_parameters(POCKET) * length + attention, rel=0.01)
    assert training_flops(POCKET, [length]) == 6 * matmul_parameters(POCKET) * length + attention / 2
    assert training_flops(POCKET, [length, 2]) > training_flops(POCKET, [length])


def test_made_up_batches_are_what_they_should_be() -> None:
    workload = Workload(groups=30, group_size=4, prompt_tokens=8, median_tokens=50, longest=200)
    batch = made_up(3, workload, 100, random.Random(0))
    lengths = sorted(len(r.response_ids) for r in batch.rollouts)
    assert batch.step == 3 and len(batch.rollouts) == 120 and len({r.rollout_id for r in batch.rollouts}) == 120
    assert 35 < lengths[60] < 70 and lengths[-1] == 192 and lengths[0] >= 1
    assert set(batch.advantages) == {1.0, -1.0}
    assert all(max((*r.prompt_ids, *r.response_ids)) < 100 for r in batch.rollouts)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["split", "colocated"])
def test_the_trainer_alone_trains_and_publishes(policy: str) -> None:
    config = config_of("pocket-tiny", ["policy.threads=1", f"placement.policy={policy}"])
    result = run_bench(config, Workload(2, 4, 8, 30, 100), repeats=2)
    assert result["tokens_per_s"] > 0 and result["publish_s"] > 0 and result["model_flops_utilisation"] is None
    assert result["step_s_spread"][0] <= result["step_s"] <= result["call_s"] + 0.05
    assert len(result["tokens"]) == 2
