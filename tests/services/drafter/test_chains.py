"""Attention of draft chains against one softmax over all that an entry may see."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.drafter import chains
from services.drafter.chains import ALIKE, ALIKE_ON_GPU, chain_attention, groups_of

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def laid(lengths: list[int], gaps: int) -> list[int]:
    """Where sequences begin, some places without any between them."""
    begins, at = [], 0
    for length in lengths:
        begins.append(at)
        at += length + gaps
    return begins


def plain(q: Tensor, far: Tensor, near: Tensor | None, begins: list[int], lengths: list[int], depth: int) -> Tensor:
    places, heads = q.shape[0], far.shape[2]
    owner, order = torch.full((places,), -1), torch.zeros(places, dtype=torch.int64)
    for i, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        owner[begin : begin + length], order[begin : begin + length] = i, torch.arange(length)
    sees = (owner[:, None] == owner) & (order <= order[:, None] - depth) & (owner >= 0)
    grouped = q.unflatten(1, (heads, -1)) * q.shape[-1] ** -0.5
    scores = torch.einsum("tmgd,smd->mgts", grouped, far[:, 0]).masked_fill(~sees, -torch.inf)
    own = near if near is not None else far.new_zeros(*far.shape, 0)
    scores = torch.cat([scores, torch.einsum("tmgd,tmdj->mgtj", grouped, own[:, 0])], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)
    out = torch.einsum("mgts,smd->tmgd", weights[..., :places], far[:, 1])
    return (out + torch.einsum("mgtj,tmdj->tmgd", weights[..., places:], own[:, 1])).flatten(1, 2)


@settings(max_examples=60, deadline=None)
@given(
    LENGTHS,
    st.integers(0, 3),
    st.integers(0, 5),
    st.sampled_from([(1, 1), (2, 3)]),
    st.sampled_from([ALIKE, ALIKE_ON_GPU]),
)
def test_outputs_and_gradients_are_those_of_one_softmax(lengths, gaps, depth, heads, alike) -> None:
    kv_heads, copies = heads
    begins = laid(lengths, gaps)
    places, draw = begins[-1] + lengths[-1] + gaps, torch.Generator().manual_seed(sum(lengths))

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw).requires_grad_()

    q, far = some(places, kv_heads * copies, 8), some(places, 2, kv_heads, 8)
    near = some(places, 2, kv_heads, 8, depth) if depth else None
    with patch.object(chains, "ALIKE", alike):
        groups = groups_of(begins, lengths, depth, CPU)
    found = chain_attention(q, far, near, groups)
    wanted = plain(q, far, near, begins, lengths, depth)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-10)
    weights, inputs = torch.randn(wanted.shape, dtype=torch.float64, generator=draw), [q, far, near][: 2 + bool(depth)]
    mine, theirs = (torch.autograd.grad((out * weights).sum(), inputs) for out in (found, wanted))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


@given(LENGTHS, st.integers(0, 5))
def test_every_chain_is_in_one_group_and_at_most_so_much_is_padding(lengths: list[int], depth: int) -> None:
    begins = laid(lengths, 1)
    groups = groups_of(begins, lengths, depth, CPU)
    queries = torch.cat([g.queries[g.real] for g in groups]) if groups else torch.tensor([], dtype=torch.int64)
    wanted = [b + t for b, n in zip(begins, lengths, strict=True) for t in range(depth, n)]
    assert sorted(queries.tolist()) == wanted
    for group in groups:
        assert torch.equal(group.queries - group.keys, torch.full_like(group.keys, depth))
        assert group.real.float().mean(1).min() >= ALIKE - 1e-6


@pytest.mark.parametrize("size", [64, 20])
def test_what_the_gpus_kernel_is_given_and_gives_back(size: int) -> None:
    """Without values: its shapes and types, of heads whose size it does not take as well."""
    q, k, v = (torch.empty(3, 8, 50, size, device="meta") for _ in range(3))
    out, norm, rest = chains._attend(q, k, v)
    assert out.shape == q.shape and norm.shape == (3, 8, 50) and norm.dtype == torch.float32
    for grad in chains._backwards(q, k, v, torch.empty_like(q), out, norm, rest):
        assert grad.shape == q.shape
