"""A step of the policy on a GPU at the shape of `reasoner-e2e`, sharded as in a team: what computing layers again and
gathering weights again takes, in seconds and in memory. `pytest -m gpu tests/gpu/test_policy_step.py -s`; figures go to
results/policy_step_3b_shape.json.

The team is of one worker, so gathering is a copy within the GPU; what launches it is what several workers launch."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from deploy.bench_policy import Workload, made_up
from services.config.policy import PolicyConfig
from services.core.types import TrainBatch
from services.models.device import free_cache, pick_device
from services.policy.team import Team, joined_team
from services.policy.trainer import PolicyTrainer
from tests.gpu.test_chains import SHAPE

NEEDS_MODEL = False  # for the folder's conftest
NEEDED_GB = 110  # weights, gradients and AdamW's moments in float32, 48 GB, its update beside them, activations
LONGEST, PACK_TOKENS, ROUNDS = 2500, 8192, 2
TOKENS = (3000, 16000)
WAYS: dict[str, dict[str, bool]] = {
    "recomputed, gathered twice": {"activation_checkpointing": True, "reshard_after_forward": True},
    "kept, gathered twice": {"activation_checkpointing": False, "reshard_after_forward": True},
    "kept, gathered once": {"activation_checkpointing": False, "reshard_after_forward": False},
}


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    if torch.cuda.get_device_properties(0).total_memory < NEEDED_GB * 1e9:
        pytest.skip(f"takes a GPU of {NEEDED_GB} GB")
    device = pick_device("cuda")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield joined_team(torch.device(device.type, 0))
    dist.destroy_process_group()


def trainer(team: Team, **settings: Any) -> PolicyTrainer:
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).float()
    config = PolicyConfig(learning_rate=5e-6, micro_batch_tokens=PACK_TOKENS, **settings)
    return PolicyTrainer(model, config, time.perf_counter, torch.bfloat16, (), False, team, team.device)


def batch(tokens: int) -> tuple[int, TrainBatch]:
    """With about so many tokens, prompts included."""

    def drawn(seed: int) -> tuple[int, TrainBatch]:
        workload = Workload(max(2, tokens // 1400), 4, 60, 250, LONGEST)
        made = made_up(1, workload, SHAPE["vocab_size"], random.Random(seed))
        return sum(len(r.prompt_ids) + len(r.response_ids) for r in made.rollouts), made

    return min((drawn(seed) for seed in range(60)), key=lambda found: abs(found[0] - tokens))


def test_a_step(team: Team, save: Callable[[str, dict[str, Any]], None]) -> None:
    work = {tokens: batch(tokens) for tokens in TOKENS}
    seconds: dict[tuple[str, int], list[float]] = {}
    peaks: dict[tuple[str, int], int] = {}
    losses: dict[tuple[str, int], float] = {}
    for _ in range(ROUNDS):  # in turns: the processor that launches changes its pace
        for way, settings in WAYS.items():
            made = trainer(team, **settings)
            for tokens, (_, own) in work.items():
                made.train_step(own)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                report = made.train_step(own).report
                torch.cuda.synchronize()
                seconds.setdefault((way, tokens), []).append(time.perf_counter() - start)
                peaks[way, tokens] = torch.cuda.max_memory_allocated()
                losses.setdefault((way, tokens), report.loss)
            del made
            gc.collect()
            free_cache(team.device)
    rows = [
        {"way": way, "tokens": work[tokens][0], "seconds": round(median(found), 4),
         "all": [round(s, 3) for s in found], "peak_gb": round(peaks[way, tokens] / 1e9, 1)}
        for (way, tokens), found in seconds.items()
    ]  # fmt: skip
    for row in rows:
        print(row)
    save(
        "policy_step_3b_shape",
        {"layers": SHAPE["num_hidden_layers"], "micro_batch_tokens": PACK_TOKENS, "workers": 1, "rows": rows},
    )
    first, *others = WAYS
    for tokens in TOKENS:
        for way in others:
            assert losses[way, tokens] == pytest.approx(losses[first, tokens], rel=0.02, abs=1e-3), way
