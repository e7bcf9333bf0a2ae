"""Attention over packed rows as a mask says it: what the kernels that know no masks are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from services.models.packing import RowLayout


def block_causal(layout: RowLayout, lag: int = 0) -> Tensor:
    """bool [R,W,W]: query t may see key s of the same sequence when s is at least `lag` positions before t.

    Lag 0 is causal attention. Nothing is visible to or from padding.
    """
    same = layout.segments[:, :, None] == layout.segments[:, None, :]
    order = layout.positions[:, None, :] <= layout.positions[:, :, None] - lag
    return same & order & layout.filled[:, :, None]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask for scaled dot-product attention, [R,1,W,W]. Padding queries see themselves: no row of -inf, no NaN."""
    own = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    blind = ~visible.any(-1, keepdim=True)
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~(visible | (blind & own)), -torch.inf)[:, None]
