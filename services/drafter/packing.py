"""Aligned sequences laid into rows: what one forward pass of the drafter trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.models.hidden import HiddenStates, align
from services.models.packing import RowLayout, block_causal, fill_rows, plan_rows, row_layout


@dataclass(frozen=True)
class DraftRows:
    """The fields of `Aligned` in rows: ids, loss_mask [R,W]; hidden, target_hidden [R,W,H]; `members` are indices into
    the packed list. Sequences in one row never see each other (`visible`)."""

    ids: Tensor
    hidden: Tensor
    target_hidden: Tensor
    loss_mask: Tensor
    layout: RowLayout
    members: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.layout.filled.sum())

    def visible(self, lag: int) -> Tensor:
        """bool [R,W,W]: keys of the same sequence at least `lag` positions back."""
        return block_causal(self.layout, lag)

    def started(self, depth: int) -> Tensor:
        """bool [R,W]: a chain that reaches this entry at `depth` began inside the same sequence."""
        return self.layout.filled & (self.layout.positions >= depth)


def pack_states(states: Sequence[HiddenStates], budget: int, device: torch.device) -> list[DraftRows]:
    """Align and pack; batches of at most `budget` tokens, padding included (a longer sequence gets its own)."""
    aligned = [align(s.input_ids, s.hidden.float(), s.loss_mask) for s in states]
    lengths = [int(a.ids.shape[0]) for a in aligned]
    rows = []
    for plan in plan_rows(lengths, budget):
        layout = row_layout(plan, lengths)
        own = [aligned[i] for i in plan.members]
        rows.append(
            DraftRows(
                ids=fill_rows(layout, [a.ids for a in own]).to(device),
                hidden=fill_rows(layout, [a.hidden for a in own]).to(device),
                target_hidden=fill_rows(layout, [a.target_hidden for a in own]).to(device),
                loss_mask=fill_rows(layout, [a.loss_mask for a in own]).to(device),
                layout=layout.to(device),
                members=plan.members,
            )
        )
    return rows
