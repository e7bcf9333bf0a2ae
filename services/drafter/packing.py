"""Aligned sequences laid into rows: what one forward pass of the drafter trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.core.errors import BatchError
from services.drafter.chains import Group, groups_of
from services.models.drafter import DrafterMethod
from services.models.hidden import Aligned, HiddenStates, align
from services.models.packing import RowLayout, RowPlan, fill_rows, plan_rows, row_layout


@dataclass(frozen=True)
class Supervised:
    """The entries that are learned from: `places` in rows laid end to end, `positions` within their sequences, int64
    [E] each, on the CPU. A boolean mask on a GPU would have the processor wait for the GPU each time to learn how many
    there are."""

    places: Tensor
    positions: Tensor

    def count(self, depth: int) -> int:
        """That a chain reaches at `depth`: it began inside the same sequence."""
        return int((self.positions >= depth).sum())

    def at(self, depth: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Those, int64 [E_depth] each: their places, and which of `places` they are."""
        own = (self.positions >= depth).nonzero()[:, 0]
        return self.places[own].to(device, non_blocking=True), own.to(device, non_blocking=True)


@dataclass(frozen=True)
class DraftRows:
    """The fields of `Aligned` in rows: ids, loss_mask [R,W]; inputs [R,W,S]; target_hidden [R,W,H]; `members` are
    indices into the packed list, `lengths` theirs; `supervised`: where loss_mask is true. Sequences in one row never
    see each other (`chains`)."""

    ids: Tensor
    inputs: Tensor
    target_hidden: Tensor
    loss_mask: Tensor
    supervised: Supervised
    layout: RowLayout
    members: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def chains(self, depth: int) -> list[Group]:
        """Who attends to whom at a depth: to entries of the same sequence at least `depth` places back."""
        return groups_of(self.layout.begins, self.lengths, depth, self.ids.device)

    def started(self, depth: int) -> Tensor:
        """bool [R,W]: a chain that reaches this entry at `depth` began inside the same sequence."""
        return self.layout.filled & (self.layout.positions >= depth)


def check_states(states: Sequence[HiddenStates], method: DrafterMethod) -> None:
    """Raises BatchError for states that a drafter of this method and target cannot read."""
    for s in states:
        for found, wanted in (
            (s.hidden.shape[1], method.target.hidden_size),
            (s.inputs.shape[1], method.state_size),
        ):
            if found != wanted:
                raise BatchError(
                    f"hidden states of size {found} reached a drafter of size {wanted} ({method.title}, which reads "
                    f"{method.reads}): they come from another target, or were collected for another drafter.method"
                )


def pack_states(states: Sequence[HiddenStates], budget: int, device: torch.device) -> list[DraftRows]:
    """Align and pack; batches of at most `budget` tokens, padding included (a longer sequence gets its own)."""
    aligned = [align(s) for s in states]
    return lay_rows(aligned, plan_rows([int(a.ids.shape[0]) for a in aligned], budget), device)


def lay_rows(aligned: Sequence[Aligned], plans: Sequence[RowPlan], device: torch.device) -> list[DraftRows]:
    lengths = [int(a.ids.shape[0]) for a in aligned]
    rows = []
    for plan in plans:
        layout = row_layout(plan, lengths)
        own = [aligned[i] for i in plan.members]
        mask = fill_rows(layout, [a.loss_mask for a in own])
        places = mask.flatten().nonzero()[:, 0].cpu()  # states may lie on a GPU
        rows.append(
            DraftRows(
                ids=fill_rows(layout, [a.ids for a in own]).to(device),
                inputs=_floats(layout, [a.inputs for a in own], device),
                target_hidden=_floats(layout, [a.target_hidden for a in own], device),
                loss_mask=mask.to(device),
                supervised=Supervised(places, layout.positions.flatten()[places]),
                layout=layout.to(device),
                members=plan.members,
                lengths=tuple(lengths[i] for i in plan.members),
            )
        )
    return rows


def _floats(layout: RowLayout, parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """`fill_rows` in float32 on `device`, which gets half as many bytes of states in half precision."""
    if len({part.dtype for part in parts}) > 1:
        parts = [part.float() for part in parts]
    return fill_rows(layout, parts).to(device).float()
