"""Micro-batches of the policy trainer: rollouts laid into rows, plus flat tensors of their response tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.core.types import Rollout
from services.models.packed import Spans, spans_of
from services.models.packing import RowLayout, RowPlan, fill_rows, plan_rows, row_layout
from services.models.sampling import SamplingTensors, sampling_tensors

EVEN = (1.0, 1.1, 1.25, 1.5, 2.0)  # of an even share: budgets that are tried, since rows have room left


@dataclass(frozen=True)
class Pack:
    """ids, positions [R,W] and the sequences' spans for the model; the rest is flat over the N response tokens: `at`
    indexes the flattened [R*W] position whose output predicts `token_ids`, `segments` counts the members."""

    members: tuple[int, ...]  # indices into the batch's rollouts
    lengths: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    layout: RowLayout
    ids: Tensor
    positions: Tensor
    spans: Spans
    at: Tensor
    token_ids: Tensor
    segments: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sampling: SamplingTensors

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


def make_packs(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    weights: Sequence[float],
    chosen: Sequence[int],
    budget: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    size: int = 1,
) -> list[Pack]:
    """Pack the rollouts `chosen` (indices); `weights[i]` is the loss weight of each response token of rollout i. Of
    `size` workers the one of this `rank` gets its part, as many packs as each other."""
    lengths = [len(rollouts[i].prompt_ids) + len(rollouts[i].response_ids) for i in chosen]
    packs = []
    for plan in own_plans(shared_plans(lengths, budget, size), rank, size):
        if plan is None:
            packs.append(empty_pack(device, dtype))
            continue
        layout = row_layout(plan, lengths)
        members = tuple(chosen[m] for m in plan.members)
        own_lengths = tuple(lengths[m] for m in plan.members)
        packs.append(_make_pack(rollouts, advantages, weights, members, own_lengths, layout, device, dtype))
    return packs


def shared_plans(lengths: Sequence[int], budget: int, size: int) -> list[RowPlan]:
    """Of as many passes as packs of the whole budget take, those whose packs are most alike: every worker waits for the
    slowest in each pass, and full packs leave the last one with a rest, or one worker with all of a small batch."""
    plans = plan_rows(lengths, budget)
    if not plans or size == 1:
        return plans
    most = -(-len(plans) // size) * size
    budgets = [round(part * sum(lengths) / most) for part in EVEN]
    budgets.append(-(-sum(len(plan.rows) for plan in plans) // most) * plans[0].width)  # full rows, dealt out
    smaller = (plan_rows(lengths, min(budget, own)) for own in budgets)
    return min([plans, *(found for found in smaller if len(found) <= most)], key=lambda p: waited_for(p, size))


def waited_for(plans: Sequence[RowPlan], size: int) -> int:
    """Places of the largest pack of each pass, in all."""
    by_size = sorted((len(plan.rows) * plan.width for plan in plans), reverse=True)
    return sum(by_size[::size])


def own_plans(plans: Sequence[RowPlan], rank: int, size: int) -> list[RowPlan | None]:
    """What the worker `rank` of `size` runs, pass by pass; None: an empty pass beside the others' last one. Plans of
    one pass are about equally large, because every worker waits for the slowest."""
    if size == 1:
        return list(plans)
    by_size: list[RowPlan | None] = sorted(plans, key=lambda plan: -len(plan.rows) * plan.width)
    by_size += [None] * (-len(plans) % size)
    return by_size[rank::size]


def empty_pack(device: torch.device, dtype: torch.dtype) -> Pack:
    """One position and no response token: a loss of 0 whose gradient is 0, from a whole forward and backward pass."""
    place, index = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64, device=device)
    value, layout = torch.zeros(0, dtype=dtype, device=device), row_layout(RowPlan(((),), 1), [])
    return Pack(
        members=(),
        lengths=(),
        prompt_lengths=(),
        layout=layout,
        ids=place.to(device),
        positions=place.to(device),
        spans=spans_of(layout, (), device),
        at=index,
        token_ids=index,
        segments=index,
        rollout_logprobs=value,
        advantages=value,
        weights=value,
        sampling=sampling_tensors([], device),
    )


def _make_pack(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    weights: Sequence[float],
    members: tuple[int, ...],
    lengths: tuple[int, ...],
    layout: RowLayout,
    device: torch.device,
    dtype: torch.dtype,
) -> Pack:
    own = [rollouts[i] for i in members]
    counts = torch.tensor([len(r.response_ids) for r in own])
    at = [
        torch.arange(len(r.response_ids)) + begin + len(r.prompt_ids) - 1
        for r, begin in zip(own, layout.begins, strict=True)
    ]

    def per_token(values: Sequence[float]) -> Tensor:
        return torch.tensor([values[i] for i in members], dtype=dtype).repeat_interleave(counts).to(device)

    return Pack(
        members=members,
        lengths=lengths,
        prompt_lengths=tuple(len(r.prompt_ids) for r in own),
        layout=layout,
        ids=fill_rows(layout, [torch.tensor((*r.prompt_ids, *r.response_ids)) for r in own]).to(device),
        positions=layout.positions.to(device),
        spans=spans_of(layout, lengths, device),
        at=torch.cat(at).to(device),
        token_ids=torch.tensor([t for r in own for t in r.response_ids]).to(device),
        segments=torch.arange(len(own)).repeat_interleave(counts).to(device),
        rollout_logprobs=torch.tensor([p for r in own for p in r.rollout_logprobs], dtype=dtype).to(device),
        advantages=per_token(advantages),
        weights=per_token(weights),
        sampling=_per_token_sampling(own, counts, device),
    )


def _per_token_sampling(rollouts: Sequence[Rollout], counts: Tensor, device: torch.device) -> SamplingTensors:
    rows = sampling_tensors([r.sampling for r in rollouts], torch.device("cpu"))
    spread = {
        name: getattr(rows, name).repeat_interleave(counts).to(device)
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    return dataclasses.replace(rows, **spread)
