"""Attention of draft chains on a GPU: values and gradients near those of the processor in float64, and what a
micro-step of the drafter takes. `pytest -m gpu tests/gpu/test_chains.py -s`; figures go to
results/drafter_chains.json."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from services.config.drafter import DrafterConfig
from services.drafter.chains import chain_attention, groups_of
from services.drafter.head import TargetHead
from services.drafter.packing import pack_states
from services.drafter.trainer import DrafterTrainer
from services.models.hidden import HiddenStates
from services.models.layers import ModelSpec, model_spec

NEEDS_MODEL = False  # for the folder's conftest
HEADS, KV_HEADS, SIZE = 32, 4, 64
REPEATS = 7
SHAPE = {
    "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 64,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "vocab_size": 96,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
}  # fmt: skip


def found(device: str, depth: int, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients."""
    lengths, draw = [700, 650, 300, 299, 40, 7, 3, 1], torch.Generator().manual_seed(depth)
    begins = [sum(lengths[:i]) for i in range(len(lengths))]

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw).to(device, dtype).requires_grad_()

    q, far = some(sum(lengths), HEADS, SIZE), some(sum(lengths), 2, KV_HEADS, SIZE)
    near = some(sum(lengths), 2, KV_HEADS, SIZE, depth) if depth else None
    out = chain_attention(q, far, near, groups_of(begins, lengths, depth, torch.device(device)))
    weights = torch.randn(out.shape, dtype=torch.float64, generator=draw).to(device, dtype)
    inputs = [q, far, near][: 2 + bool(depth)]
    return [t.detach().double().cpu() for t in (out, *torch.autograd.grad((out * weights).sum(), inputs))]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_it_computes_what_the_processor_computes(depth: int) -> None:
    for mine, exact in zip(found("cuda", depth, torch.float32), found("cpu", depth, torch.float64), strict=True):
        error = float((mine - exact).norm() / exact.norm())
        assert error < 0.01, error


def test_states_that_lie_there_are_laid_out_as_those_on_the_processor() -> None:
    """A warm-up's states do, a run's do not."""
    rng = random.Random(1)
    states = [s for _ in range(2) for s in drawn(rng, model_spec(SHAPE), 60, 600)]
    there = [HiddenStates(s.input_ids.cuda(), s.hidden.cuda(), s.loss_mask.cuda(), 0) for s in states]
    device = torch.device("cuda")
    for mine, exact in zip(pack_states(there, 4096, device), pack_states(states, 4096, device), strict=True):
        for name in ("ids", "inputs", "target_hidden", "loss_mask"):
            assert torch.equal(getattr(mine, name), getattr(exact, name)), name
        for name in ("places", "positions"):
            found, wanted = getattr(mine.supervised, name), getattr(exact.supervised, name)
            assert found.device.type == "cpu" and torch.equal(found, wanted), name


def test_a_micro_step(save: Callable[[str, dict[str, Any]], None]) -> None:
    """Of the drafter of `reasoner-e2e`: 4,096 tokens, four depths, lengths as that run's."""
    spec = model_spec(SHAPE)
    trainer = DrafterTrainer(spec, DrafterConfig(unroll=4, pack_tokens=4096), 1.0, torch.device("cuda"))
    trainer._drafter.reset(torch.Generator(device="cuda").manual_seed(0))
    embed = torch.randn(spec.vocab_size, spec.hidden_size, device="cuda")
    trainer.load_head(TargetHead(embed, embed, 0))
    rng, rows = random.Random(0), []
    for median_length, longest in ((200, 3300), (60, 600)):
        times = []
        for _ in range(REPEATS + 2):
            states = drawn(rng, spec, median_length, longest)
            torch.cuda.synchronize()
            start = time.perf_counter()
            trainer.train_micro_step(states)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        rows.append({"median_length": median_length, "longest": longest, "seconds": round(median(times[2:]), 4)})
        print(rows[-1])
    parameters, peak = sum(p.numel() for p in trainer._drafter.parameters()), torch.cuda.max_memory_allocated()
    save("drafter_chains", {"tokens": 4096, "unroll": 4, "parameters": parameters, "peak_bytes": peak, "rows": rows})


def drawn(rng: random.Random, spec: ModelSpec, median_length: float, longest: int) -> list[HiddenStates]:
    states, left = list[HiddenStates](), 4096
    while left > 8:
        n = min(left, longest, max(8, round(median_length * rng.lognormvariate(0.0, 1.5))))
        ids = torch.randint(spec.vocab_size, (n,))
        states.append(HiddenStates(ids, torch.randn(n, spec.hidden_size).bfloat16(), torch.arange(n) >= 2, 0))
        left -= n
    return states
