"""Packed attention against attention under a mask that keeps the same sequences apart."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.models import packed
from services.models.packed import Spans, packed_attention, spans_of
from services.models.packing import plan_rows, row_layout
from tests.services.models.masks import additive, block_causal

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 8


def inputs(rows: int, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value, as a layer makes them."""
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    shapes = [(rows, heads, width, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True).transpose(1, 2)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.sampled_from([None, 0.3]))
def test_output_and_gradients_are_those_under_a_mask(lengths: list[int], scaling: float | None) -> None:
    for plan in plan_rows(lengths, 40):
        layout, own = row_layout(plan, lengths), [lengths[i] for i in plan.members]
        rows, width = layout.segments.shape
        spans, mask = spans_of(layout, own, CPU), additive(block_causal(layout), torch.float64)
        mine, theirs = inputs(rows, width), inputs(rows, width)
        packed_out = packed_attention(None, *mine, scaling=scaling, spans=spans)[0]
        assert packed_out.shape == (rows, width, HEADS, SIZE) and torch.isfinite(packed_out).all()
        found = []
        for tensors, out in ((mine, packed_out), (theirs, masked(*theirs, mask, scaling))):
            real = out * layout.filled[:, :, None, None]
            (real * torch.linspace(-1, 1, real.numel(), dtype=real.dtype).view_as(real)).sum().backward()
            found.append([real, *(t.grad for t in tensors)])
        for own_part, other in zip(*found, strict=True):
            torch.testing.assert_close(own_part, other, rtol=1e-10, atol=1e-12)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 60))
def test_each_sequence_is_a_span_and_the_rest_of_a_row_another(lengths: list[int], budget: int) -> None:
    for plan in plan_rows(lengths, budget):
        layout, own = row_layout(plan, lengths), [lengths[i] for i in plan.members]
        spans, segments = spans_of(layout, own, CPU), layout.segments.flatten().tolist()
        assert spans.ends[0] == 0 and spans.ends[-1] == len(segments) and spans.device_ends.tolist() == list(spans.ends)
        assert spans.device_ends.dtype == torch.int32 and spans.longest == max(b - a for a, b in pairwise(spans.ends))
        real = [b - a for a, b in pairwise(spans.ends) if segments[a] >= 0]
        assert sorted(real) == sorted(own)
        for a, b in pairwise(spans.ends):
            assert len({*segments[a:b]}) == 1 and a // plan.width == (b - 1) // plan.width


def test_without_spans_each_row_is_one_sequence() -> None:
    query, key, value = inputs(3, 5)
    mask = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
    torch.testing.assert_close(packed_attention(None, query, key, value)[0], masked(query, key, value, mask, None))


@pytest.mark.parametrize("scaling", [None, 0.25])
def test_the_gpu_s_kernel_gets_one_dtype_as_many_heads_and_its_own_scale(
    monkeypatch: pytest.MonkeyPatch, scaling: float | None
) -> None:
    """Under autocast norms give float32 where projections give bfloat16. The kernel is played by the other path."""
    asked: dict[str, Any] = {}

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, other: Tensor, most: int, same: int, **more: Any
    ) -> Tensor:
        asked.update(more, dtypes={t.dtype for t in (q, k, v)}, heads={t.shape[1] for t in (q, k, v)}, most=most)
        assert ends is other and most == same
        return packed._one_by_one(q, k, v, Spans.at(ends.tolist(), CPU), None)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    query, key, value = inputs(2, 6, torch.float32)
    flat = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value.bfloat16())]
    spans = Spans.at((0, 4, 6, 12), CPU)
    out = packed._flash(*flat, spans, scaling)
    expected = packed_attention(None, query, key, value, scaling=scaling, spans=spans)[0].flatten(0, 1)
    assert asked == {"window_size": (-1, 0), "dtypes": {torch.bfloat16}, "heads": {HEADS}, "most": 6}
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
