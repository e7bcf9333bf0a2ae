"""Attention of draft chains without a matrix of W x W weights.

An entry of depth j attends to keys of its own sequence at least j places back (`far`, from true target states) and to
the j drafts of its own chain (`near`). Both are parts of one softmax. The far part is causal attention of a sequence
without its first j entries over the same without its last j, which FlashAttention computes and tells the log of its
normaliser; the near part is j products. They are put together by their normalisers (as parts of a softmax are in
FlashAttention itself, Dao 2023, arXiv 2307.08691, and between machines in ring attention, Liu et al. 2023, arXiv
2310.01889).

Backwards the far part is the kernel's own gradient, told the whole softmax's output and normaliser instead of its part
of them: a weight's gradient is weight * (its own - the row's mean), and both then are those of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.models.packed import for_each_head

aten = torch.ops.aten
# Of the longest sequence's length: shorter ones are not in its group. On a processor padding costs time. On a GPU it is
# cheap, and launching some fifty kernels for each group, forward and backward, is not.
ALIKE, ALIKE_ON_GPU = 0.7, 0.15
KERNEL_SIZES = 8  # of what a head's size must be a multiple for the kernel


@dataclass(frozen=True)
class Group:
    """Sequences of similar length, S of them: places in the flattened rows of their queries and keys, int64 [S,L] each;
    `real` bool [S,L]: false behind a sequence's end, where its last place stands; `entries` int64 [E]: where in S*L it
    is true (known beforehand, so that a GPU need not be asked)."""

    queries: Tensor
    keys: Tensor
    real: Tensor
    entries: Tensor

    def own(self, t: Tensor) -> Tensor:
        """[S,L,...] -> [E,...] without the padding."""
        return t.flatten(0, 1)[self.entries]


def groups_of(begins: Sequence[int], lengths: Sequence[int], depth: int, device: torch.device) -> list[Group]:
    """`begins`: places of the sequences' first entries. Those of no more than `depth` entries have no chain so deep."""
    left = sorted(
        ((length - depth, begin) for begin, length in zip(begins, lengths, strict=True) if length > depth), reverse=True
    )
    found: list[Group] = []
    alike = ALIKE if device.type == "cpu" else ALIKE_ON_GPU
    while left:
        longest = left[0][0]
        own = [(n, begin) for n, begin in left if n >= alike * longest]
        left = left[len(own) :]
        counts, first = torch.tensor([n for n, _ in own]), torch.tensor([begin for _, begin in own])
        places = torch.minimum(torch.arange(longest), counts[:, None] - 1)
        keys, real = first[:, None] + places, torch.arange(longest) < counts[:, None]
        entries = real.flatten().nonzero()[:, 0]
        found.append(Group(*(t.to(device, non_blocking=True) for t in (keys + depth, keys, real, entries))))
    return found


def chain_attention(q: Tensor, far: Tensor, near: Tensor | None, groups: Sequence[Group]) -> Tensor:
    """q [T,N,D]; far [T,2,M,D]: keys and values by place; near [T,2,M,D,J]: those of each entry's own chain (None:
    depth 0) -> [T,N,D]. Zeros where an entry attends to nothing. On a GPU the far part is computed in bfloat16."""
    nothing = far.new_zeros(*far.shape, 0) if near is None else near
    out: Tensor = _ChainAttention.apply(q, far, nothing, groups)  # type: ignore[no-untyped-call]
    return out


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, far: Tensor, near: Tensor, groups: Sequence[Group]) -> Tensor:  # type: ignore[override]
        out, norm = q.new_zeros(q.shape), q.new_full(q.shape[:2], -torch.inf)
        told = []
        for group in groups:
            mixed, normaliser, rest = _attend(*_inputs(q, far, group))
            told.append(rest)
            places = group.own(group.queries)
            out[places] = group.own(mixed.transpose(1, 2)).to(out.dtype)
            norm[places] = group.own(normaliser.transpose(1, 2)).to(out.dtype)
        if near.shape[-1]:
            out, norm = _with_near(q, near, out, norm)
        ctx.save_for_backward(q, far, near, out, norm)
        ctx.groups, ctx.told = groups, told
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, far, near, out, norm = ctx.saved_tensors
        grad_q, grad_far = torch.zeros_like(q), torch.zeros_like(far)
        for group, rest in zip(ctx.groups, ctx.told, strict=True):
            inputs = _inputs(q, far, group)
            whole = [_gathered(t, group.queries) for t in (grad, out)]
            whole[0] = whole[0] * group.real[:, None, :, None]
            normaliser = norm[group.queries].transpose(1, 2)
            dq, dk, dv = _backwards(*inputs, *whole, normaliser, rest)
            grad_q[group.own(group.queries)] = group.own(dq.transpose(1, 2)).to(q.dtype)
            both = [group.own(_by_kv_head(t.to(far.dtype), far.shape[2])) for t in (dk, dv)]
            grad_far[group.own(group.keys)] = torch.stack(both, dim=1)
        grad_near = torch.zeros_like(near)
        if near.shape[-1]:
            dq, grad_near = _near_backwards(q, near, out, norm, grad)
            grad_q += dq
        return grad_q, grad_far, grad_near, None


# ---------------------------------------------------------------------------- near: the chain's own drafts


def _scores(q: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """(q by key/value head [T,M,G,D], scaled scores [T,M,G,J])"""
    grouped = q.unflatten(1, (near.shape[2], -1))
    return grouped, torch.einsum("tmgd,tmdj->tmgj", grouped, near[:, 0]) * q.shape[-1] ** -0.5


def _with_near(q: Tensor, near: Tensor, out: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    _, scores = _scores(q, near)
    whole = torch.logaddexp(norm, scores.logsumexp(-1).flatten(1, 2))
    weights = (scores - whole.unflatten(1, scores.shape[1:3])[..., None]).exp()
    mixed = torch.einsum("tmgj,tmdj->tmgd", weights, near[:, 1]).flatten(1, 2)
    return out * (norm - whole).exp()[..., None] + mixed, whole


def _near_backwards(q: Tensor, near: Tensor, out: Tensor, norm: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    grouped, scores = _scores(q, near)
    heads = scores.shape[1:3]
    weights = (scores - norm.unflatten(1, heads)[..., None]).exp()
    upon, mean = grad.unflatten(1, heads), (grad * out).sum(-1).unflatten(1, heads)
    inner = weights * (torch.einsum("tmgd,tmdj->tmgj", upon, near[:, 1]) - mean[..., None]) * q.shape[-1] ** -0.5
    grad_q = torch.einsum("tmgj,tmdj->tmgd", inner, near[:, 0]).flatten(1, 2)
    keys = torch.einsum("tmgj,tmgd->tmdj", inner, grouped)
    return grad_q, torch.stack([keys, torch.einsum("tmgj,tmgd->tmdj", weights, upon)], dim=1)


# ---------------------------------------------------------------------------- far: the kernel's part


def _inputs(q: Tensor, far: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a group, [S,N,L,D] each."""
    own, both = _gathered(q, group.queries), far[group.keys]
    k, v = (for_each_head(both[:, :, i].transpose(1, 2), own) for i in (0, 1))
    return own, k, v


def _gathered(t: Tensor, places: Tensor) -> Tensor:
    """[T,N,D] at [S,L] -> [S,N,L,D]."""
    return t[places].transpose(1, 2)


def _by_kv_head(t: Tensor, heads: int) -> Tensor:
    """[S,N,L,D] -> [S,L,M,D], summed over the query heads that share one."""
    return t.unflatten(1, (heads, -1)).sum(2).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """(out [S,N,L,D], log of the normaliser [S,N,L], what `_backwards` needs besides)."""
    scale = q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        out, norm = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        return out, norm, ()
    size = q.shape[-1]
    out, norm, ends_q, ends_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        *(_for_kernel(t) for t in (q, k, v)), 0.0, True, False, scale=scale
    )
    return out[..., :size], norm, (ends_q, ends_k, max_q, max_k, seed, offset)


def _backwards(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, norm: Tensor, rest: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, norm.contiguous(), 0.0, True, scale=scale
        )
        return found[0], found[1], found[2]
    ends_q, ends_k, max_q, max_k, seed, offset = rest
    found = aten._scaled_dot_product_flash_attention_backward(
        *(_for_kernel(t) for t in (grad, q, k, v, out)), norm.float().contiguous(), ends_q, ends_k, max_q, max_k, 0.0,
        True, seed, offset, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (t[..., : q.shape[-1]] for t in found)
    return dq, dk, dv


def _for_kernel(t: Tensor) -> Tensor:
    return F.pad(t, (0, -t.shape[-1] % KERNEL_SIZES)).to(torch.bfloat16)
