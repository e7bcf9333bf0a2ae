"""Target hidden states on their way to the drafter, and the one alignment everybody uses.

Warm start, online training and the engine all follow `align`; a shift between them would train a drafter for positions
it never sees (the fault class of pitfalls row 28).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HiddenStates:
    """One sequence: input_ids int64 [T]; hidden [T,H], the target's last hidden state after its final norm, so that
    LM head(hidden[t]) predicts input_ids[t+1]; loss_mask bool [T], True where input_ids[t] is a response token."""

    input_ids: Tensor
    hidden: Tensor
    loss_mask: Tensor
    policy_version: int

    def __post_init__(self) -> None:
        assert self.input_ids.shape == self.loss_mask.shape == self.hidden.shape[:1]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.input_ids, self.hidden, self.loss_mask))


@dataclass(frozen=True)
class Aligned:
    """Drafter inputs and targets, index t = 0..T-2: from (ids[t], hidden[t]) at `positions[t]` the drafter predicts
    `target_hidden[t]`, whose LM-head distribution is that of the token after ids[t]; `loss_mask[t]` says whether that
    token is a supervised one."""

    ids: Tensor
    hidden: Tensor
    positions: Tensor
    target_hidden: Tensor
    loss_mask: Tensor


def align(input_ids: Tensor, hidden: Tensor, loss_mask: Tensor) -> Aligned:
    """EAGLE's shift: token t+1 meets the hidden state of token t, at position t (Li et al. 2024, as SGLang runs it).

    input_ids [T], hidden [T,H], loss_mask [T] -> T-1 entries. Entry t draws the distribution of token t+2, so the mask
    is shifted by two; the last entry would predict a token past the end and is never supervised.
    """
    past_end = torch.zeros_like(loss_mask[1:2])  # nothing at all for a sequence of one token
    return Aligned(
        ids=input_ids[1:],
        hidden=hidden[:-1],
        positions=torch.arange(input_ids.shape[0] - 1, device=input_ids.device),
        target_hidden=hidden[1:],
        loss_mask=torch.cat([loss_mask[2:], past_end]),
    )
