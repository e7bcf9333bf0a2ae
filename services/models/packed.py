"""Attention of sequences that lie packed in rows, each by itself: what a token may not see is never computed.

With a mask [R,1,W,W] a row of ten short sequences costs as much as one long one, and on a GPU the kernel that takes a
mask knows of no causal half. Here rows are laid end to end, and sequences are told apart by where they begin: in half
precision on a GPU FlashAttention over variable lengths (Dao 2023, arXiv 2307.08691), elsewhere one call for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from services.models.packing import RowLayout

NAME = "longtail_packed"
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Spans:
    """Sequences among the tokens of all rows, laid end to end: `ends[i]` is where one ends and the next begins, from 0
    up to R*W; what is left of a row is a sequence of its own. `device_ends`: the same, int32."""

    ends: tuple[int, ...]
    device_ends: Tensor

    @classmethod
    def at(cls, ends: Sequence[int], device: torch.device) -> Spans:
        return cls(tuple(ends), torch.tensor(ends, dtype=torch.int32, device=device))

    @property
    def longest(self) -> int:
        return max(b - a for a, b in pairwise(self.ends))


def spans_of(layout: RowLayout, lengths: Sequence[int], device: torch.device) -> Spans:
    """`lengths`: of the layout's members."""
    rows, width = layout.segments.shape
    begins = layout.begins
    ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
    return Spans.at(sorted({*begins, *ends, *range(0, rows * width + 1, width)}), device)


def use_packed_attention(model: PreTrainedModel) -> None:
    """In place. Its forward then takes `spans`; without them each row is one sequence. No attention mask."""
    AttentionInterface.register(NAME, packed_attention)
    model.set_attn_implementation(NAME)


def packed_attention(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    spans: Spans | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: query [R,N,W,D], key and value [R,M,W,D] -> [R,W,N,D]."""
    assert attention_mask is None, "sequences are told apart by spans"
    rows, heads, width, size = query.shape
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # [R*W, N or M, D]
    attend = _flash if value.is_cuda and value.dtype in HALVES else _one_by_one
    out = attend(q, k, v, spans or Spans.at(range(0, rows * width + 1, width), query.device), scaling)
    return out.reshape(rows, width, heads, size), None


def _flash(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if scaling is not None:
        q = q * (scaling * q.shape[-1] ** 0.5)  # the kernel's own is 1 / sqrt(D)
    # Under autocast norms give float32 where projections do not
    q, k, v = q.to(v.dtype), for_each_head(k, q).to(v.dtype), for_each_head(v, q)
    ends, longest = spans.device_ends, spans.longest
    out: Tensor = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))
    return out


def for_each_head(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values with each head as often as query heads share it; heads are dimension 1 of both."""
    return t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scaling: float | None) -> Tensor:
    lengths = [b - a for a, b in pairwise(spans.ends)]
    # Split once: the gradient of a slice is as large as what it was cut from
    sequences = zip(*(t.transpose(0, 1)[None].split(lengths, dim=2) for t in (q, k, v)), strict=True)
    parts = [F.scaled_dot_product_attention(*own, is_causal=True, scale=scaling, enable_gqa=True) for own in sequences]
    return torch.cat(parts, dim=2)[0].transpose(0, 1)
