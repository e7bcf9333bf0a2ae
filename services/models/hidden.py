"""Target hidden states on their way to the drafter, and the one alignment everybody uses.

Warm start, online training and the engine all follow `align`; a shift between them would train a drafter for positions
it never sees (the fault class of pitfalls row 28).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.core.types import HiddenStateChunk


@dataclass(frozen=True)
class HiddenStates:
    """One sequence: input_ids int64 [T]; hidden [T,H], the target's last hidden state after its final norm, so that
    LM head(hidden[t]) predicts input_ids[t+1]; loss_mask bool [T], True where input_ids[t] is a response token; aux
    [T,3H], the outputs of the drafter's aux layers side by side (EAGLE-3; None when it reads `hidden` itself)."""

    input_ids: Tensor
    hidden: Tensor
    loss_mask: Tensor
    policy_version: int
    aux: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.input_ids.shape == self.loss_mask.shape == self.hidden.shape[:1]
        assert self.aux is None or self.aux.shape[:1] == self.input_ids.shape

    @property
    def inputs(self) -> Tensor:
        """[T,S]: the states the drafter is fed with."""
        return self.hidden if self.aux is None else self.aux

    @property
    def num_bytes(self) -> int:
        parts = (self.input_ids, self.hidden, self.loss_mask, self.aux)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    def copied(self) -> HiddenStates:
        aux = None if self.aux is None else self.aux.clone()
        return HiddenStates(
            self.input_ids.clone(), self.hidden.clone(), self.loss_mask.clone(), self.policy_version, aux
        )

    def detached(self) -> HiddenStates:
        aux = None if self.aux is None else self.aux.detach()
        return dataclasses.replace(self, hidden=self.hidden.detach(), aux=aux)


def chunk_of(
    states: Sequence[HiddenStates], policy_version: int, step: int, num_missing: int = 0, lost_bytes: int = 0
) -> HiddenStateChunk:
    """What is told of `states`, which are all of one policy version."""
    return HiddenStateChunk(
        policy_version=policy_version,
        step=step,
        num_sequences=len(states),
        num_tokens=sum(len(s.input_ids) for s in states),
        num_bytes=sum(s.num_bytes for s in states),
        num_missing=num_missing,
        lost_bytes=lost_bytes,
    )


@dataclass(frozen=True)
class Aligned:
    """Drafter inputs and targets, index t = 0..T-2: from (ids[t], inputs[t]) at `positions[t]` the drafter predicts
    `target_hidden[t]`, whose LM-head distribution is that of the token after ids[t]; `loss_mask[t]` says whether that
    token is a supervised one."""

    ids: Tensor
    inputs: Tensor
    positions: Tensor
    target_hidden: Tensor
    loss_mask: Tensor


def align(states: HiddenStates) -> Aligned:
    """EAGLE's shift, and EAGLE-3's: token t+1 meets the target states of token t, at position t (Li et al. 2024, as
    SGLang runs it).

    T tokens -> T-1 entries. Entry t draws the distribution of token t+2, so the mask is shifted by two; the last entry
    would predict a token past the end and is never supervised.
    """
    ids, mask = states.input_ids, states.loss_mask
    past_end = torch.zeros_like(mask[1:2])  # nothing at all for a sequence of one token
    return Aligned(
        ids=ids[1:],
        inputs=states.inputs[:-1],
        positions=torch.arange(ids.shape[0] - 1, device=ids.device),
        target_hidden=states.hidden[1:],
        loss_mask=torch.cat([mask[2:], past_end]),
    )
