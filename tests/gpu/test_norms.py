"""Norms of a training step on a GPU: one kernel is as near to float64 as those written out, and what it saves.
`pytest -m gpu tests/gpu/test_norms.py -s`; figures go to results/norms.json."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from services.models.norms import _fused

NEEDS_MODEL = False  # for the folder's conftest
TOKENS, REPEATS = 8192, 15
# Of `reasoner-e2e`: the stream, and the heads of queries and of keys.
SHAPES = {"stream": (TOKENS, 2048), "queries": (TOKENS, 32, 64), "keys": (TOKENS, 4, 64)}
KINDS = {"written_out": Qwen3RMSNorm, "one_kernel": _fused(Qwen3RMSNorm)}


class Exact(Qwen3RMSNorm):
    """In the input's format, which transformers' own makes float32."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def norm(size: int, kind: type[nn.Module], dtype: torch.dtype, device: str = "cuda") -> nn.Module:
    made = kind(size).to(device, torch.float32)
    generator = torch.Generator().manual_seed(size)
    made.weight.data.copy_(torch.rand(size, generator=generator) + 0.5)
    return made.to(dtype)


def computed(made: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output and gradients of input and weight."""
    x = x.detach().requires_grad_()
    out = made(x)
    return [t.detach().double().cpu() for t in (out, *torch.autograd.grad(out, [x, made.weight], gradient))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_it_is_as_near_to_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gradient = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    exact = norm(shape[-1], Exact, dtype).double().cpu()
    wanted = computed(exact, x.double().cpu(), gradient.double().cpu())
    found = [computed(norm(shape[-1], kind, dtype), x, gradient) for kind in KINDS.values()]
    errors = [[float((a - b).norm() / b.norm()) for a, b in zip(own, wanted, strict=True)] for own in found]
    for name, written_out, mine in zip(("output", "input", "weight"), *errors, strict=True):
        assert mine < 1.1 * written_out + 1e-6, (name, mine, written_out)


def test_what_it_saves(save: Callable[[str, dict[str, Any]], None]) -> None:
    rows = []
    for name, shape in SHAPES.items():
        x, gradient = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        x.requires_grad_()
        row: dict[str, Any] = {"what": name, "shape": list(shape)}
        for label, kind in KINDS.items():
            made = norm(shape[-1], kind, torch.bfloat16)
            row[label] = {"seconds": timed(made, x, gradient), "kernels": kernels(made, x, gradient)}
        rows.append(row)
        print(row)
        assert row["one_kernel"]["kernels"] < row["written_out"]["kernels"] / 2
    save("norms", {"tokens": TOKENS, "dtype": "bfloat16", "rows": rows})


def timed(made: nn.Module, x: Tensor, gradient: Tensor) -> float:
    """Forward and backward."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        made(x).backward(gradient)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return round(median(times[3:]), 6)


def kernels(made: nn.Module, x: Tensor, gradient: Tensor) -> int:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        made(x).backward(gradient)
        torch.cuda.synchronize()
    return sum(event.count for event in found.key_averages() if "LaunchKernel" in event.key)
