"""How far a drafter's chains reach, from the target's own responses: no engine, any method.

Teacher-forced: a chain follows what the target said, at the temperature it said it. At temperature 0 that is the chain
an engine verifies. Above it an accepted draft is a draw from min(target_probs, draft_probs), the target's own token one
from target_probs, so that deeper positions are an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from services.drafter.head import TargetHead
from services.drafter.loss import chain_reach, expected_acceptance
from services.drafter.packing import check_states, pack_states
from services.drafter.unroll import unroll
from services.models.drafter import Drafter, DrafterMethod
from services.models.hidden import HiddenStates
from services.models.layers import RopeTable

PACK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class ChainReach:
    """`reach[k]`: of all chains, those whose first k + 1 drafts are accepted. `num_tokens`: chains looked at."""

    reach: tuple[float, ...]
    num_tokens: int

    @property
    def rates(self) -> tuple[float, ...]:
        """By position, given that those before were accepted."""
        return tuple(after / before if before else 0.0 for before, after in pairwise((1.0, *self.reach)))

    @property
    def acceptance_length(self) -> float:
        return 1.0 + sum(self.reach)


@torch.no_grad()
def chain_reach_of(
    method: DrafterMethod,
    tensors: Mapping[str, Tensor],
    head: TargetHead,
    states: Sequence[HiddenStates],
    depth: int,
    temperature: float,
) -> ChainReach:
    """Chains of `depth` drafts from every response token of `states`, which were made at `temperature`. Raises
    BatchError for states that this drafter cannot read."""
    check_states(states, method)
    device = head.embed.device
    drafter = Drafter(method).to(device)
    drafter.load(tensors)
    rope = RopeTable(method.spec, max(len(s.input_ids) for s in states), device, torch.float32)
    sums, starts = [0.0] * depth, 0
    for rows in pack_states(states, PACK_TOKENS, device):
        predicted = unroll(drafter, rows, head.embed, rope, depth)
        alphas = expected_acceptance(predicted, rows, head.head, temperature, drafter.head(head.head))
        reach = chain_reach(alphas, rows)
        sums = [total + float(part.sum()) for total, part in zip(sums, reach, strict=True)]
        starts += reach[0].numel()
    return ChainReach(tuple(total / max(1, starts) for total in sums), starts)
