"""Packed attention's kernel on a GPU: the same values and gradients as one call per sequence, and how much faster than
under a mask. `pytest -m gpu tests/gpu/test_packed.py -s`; figures go to results/packed_attention.json."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.models import packed
from services.models.packed import Spans, packed_attention, spans_of
from services.models.packing import RowLayout, plan_rows, row_layout
from tests.services.models.masks import additive, block_causal

NEEDS_MODEL = False  # for the folder's conftest
pytestmark = pytest.mark.timeout(200)

HEADS, KV_HEADS, SIZE = 32, 4, 64  # of the 3 billion parameters of reasoner-e2e
BUDGET, REPEATS = 8192, 10


def layouts(longest: int) -> list[tuple[RowLayout, list[int]]]:
    """Of a step's packs, with their lengths."""
    rng = random.Random(0)
    lengths = [min(longest, 64 + round(300 * rng.lognormvariate(0.0, 1.0))) for _ in range(48)]
    return [(row_layout(plan, lengths), [lengths[i] for i in plan.members]) for plan in plan_rows(lengths, BUDGET)]


def inputs(layout: RowLayout, dtype: torch.dtype) -> list[Tensor]:
    rows, width = layout.segments.shape
    generator = torch.Generator("cuda").manual_seed(width)
    return [
        torch.randn(rows, heads, width, SIZE, generator=generator, dtype=torch.float32, device="cuda")
        .to(dtype).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]  # fmt: skip


def gradients(out: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).to(out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_one_call_per_sequence(dtype: torch.dtype) -> None:
    for layout, lengths in layouts(1200):
        spans = spans_of(layout, lengths, torch.device("cuda"))
        tensors, exact = inputs(layout, dtype), [t.double() for t in inputs(layout, dtype)]
        flat = [t.transpose(1, 2).flatten(0, 1) for t in tensors]
        kernel = packed._flash(*flat, spans, SIZE**-0.5)
        mine = [kernel, *gradients(kernel, tensors)]
        exact = [t.detach().requires_grad_() for t in exact]
        out = packed_attention(None, *exact, scaling=SIZE**-0.5, spans=spans)[0].flatten(0, 1)
        for one, other in zip(mine, [out, *gradients(out, exact)], strict=True):
            error = (one.double() - other).norm() / other.norm()
            assert error < 0.01, error


def seconds(action: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[2:])


def under_a_mask(tensors: Sequence[Tensor], mask: Tensor) -> Tensor:
    query, key, value = tensors
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)


def test_it_is_faster_than_a_mask(save: Callable[[str, dict[str, Any]], None]) -> None:
    rows = []
    for longest in (600, 1200, 4096):
        took = {"packed_s": 0.0, "masked_s": 0.0, "mask_s": 0.0}
        for layout, lengths in layouts(longest):
            spans: Spans = spans_of(layout, lengths, torch.device("cuda"))
            make = lambda layout=layout: additive(block_causal(layout), torch.bfloat16).cuda()  # noqa: E731
            tensors, mask = inputs(layout, torch.bfloat16), make()
            took["mask_s"] += seconds(make)
            took["packed_s"] += seconds(
                lambda t=tensors, s=spans: gradients(packed_attention(None, *t, spans=s)[0], t)  # type: ignore[misc]
            )
            took["masked_s"] += seconds(
                lambda t=tensors, m=mask: gradients(under_a_mask(t, m), t)  # type: ignore[misc]
            )
        rows.append({"longest": longest, "packs": len(layouts(longest)), **{k: round(s, 6) for k, s in took.items()}})
        print(rows[-1])
    save("packed_attention", {"heads": HEADS, "kv_heads": KV_HEADS, "size": SIZE, "budget": BUDGET, "rows": rows})
    assert all(row["packed_s"] < row["masked_s"] for row in rows)
