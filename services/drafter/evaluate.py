"""How far a drafter's chains reach, from the target's own responses: no engine, any method.

An engine drafts where the round before ended, not everywhere: behind places that were hard. So the rounds are replayed.
With q(s, n) the probability that the round beginning at s accepts n drafts, the expected number of rounds that begin
at s is

    rounds(s) = sum_n rounds(s - n - 1) q(s - n - 1, n)        and 1 at the beginning of the response

and every round counts with that weight. At temperature 0 all q are 0 or 1 and this is what an engine does, round by
round. Above it, it is teacher-forced: an accepted draft is a draw from min(target_probs, draft_probs), the response's
own token one from target_probs, so that deeper positions are an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from services.drafter.head import TargetHead
from services.drafter.loss import chain_reach, expected_acceptance
from services.drafter.packing import DraftRows, check_states, pack_states
from services.drafter.unroll import unroll
from services.models.drafter import Drafter, DrafterMethod
from services.models.hidden import HiddenStates
from services.models.layers import RopeTable

PACK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class ChainReach:
    """`reach[k]`: of all rounds, those whose first k + 1 drafts are accepted. `rounds`: expected, of all responses."""

    reach: tuple[float, ...]
    rounds: float

    @property
    def rates(self) -> tuple[float, ...]:
        """By position, given that those before were accepted."""
        return tuple(after / before if before else 0.0 for before, after in pairwise((1.0, *self.reach)))

    @property
    def acceptance_length(self) -> float:
        return 1.0 + sum(self.reach)


def chain_reach_of(
    method: DrafterMethod,
    tensors: Mapping[str, Tensor],
    head: TargetHead,
    states: Sequence[HiddenStates],
    depth: int,
    temperature: float,
) -> ChainReach:
    """Rounds of chains of `depth` drafts through the responses of `states`, which were made at `temperature`. Raises
    BatchError for states that this drafter cannot read."""
    sums, rounds = torch.zeros(depth, dtype=torch.float64), 0.0
    for places in reach_by_place(method, tensors, head, states, depth, temperature):
        weights = torch.tensor(rounds_at(places), dtype=torch.float64)
        sums += weights @ torch.tensor(places, dtype=torch.float64)
        rounds += float(weights.sum())
    return ChainReach(tuple(total / rounds if rounds else 0.0 for total in sums.tolist()), rounds)


@torch.no_grad()
def reach_by_place(
    method: DrafterMethod,
    tensors: Mapping[str, Tensor],
    head: TargetHead,
    states: Sequence[HiddenStates],
    depth: int,
    temperature: float,
) -> Iterator[list[list[float]]]:
    """Response by response, in any order: [s][k], that a round which begins with s response tokens known accepts more
    than k drafts."""
    check_states(states, method)
    device = head.embed.device
    drafter = Drafter(method).to(device)
    drafter.load(tensors)
    rope = RopeTable(method.spec, max(len(s.input_ids) for s in states), device, torch.float32)
    for rows in pack_states(states, PACK_TOKENS, device):
        predicted = unroll(drafter, rows, head.embed, rope, depth)
        alphas = expected_acceptance(predicted, rows, head.head, temperature, drafter.head(head.head))
        yield from _by_response(torch.stack(chain_reach(alphas, rows), dim=1), rows)


def rounds_at(reach: Sequence[Sequence[float]]) -> list[float]:
    """Expected rounds that begin at each place of a response; `reach[s][k]`: a round at s accepts more than k."""
    rounds = [0.0] * len(reach)
    if rounds:
        rounds[0] = 1.0
    for s, own in enumerate(reach):
        for accepted, (at_least, more) in enumerate(pairwise((1.0, *own, 0.0))):
            after = s + accepted + 1
            if after < len(rounds):
                rounds[after] += rounds[s] * (at_least - more)
    return rounds


def _by_response(reach: Tensor, rows: DraftRows) -> Iterator[list[list[float]]]:
    """[starts,depth] of all supervised entries, response by response."""
    width = rows.loss_mask.shape[1]
    row = torch.arange(rows.loss_mask.shape[0], device=reach.device)[:, None].expand(-1, width)
    owner = torch.stack([row, rows.layout.segments], dim=-1)[rows.loss_mask]
    for _, count in zip(*(t.tolist() for t in owner.unique_consecutive(dim=0, return_counts=True)), strict=True):
        own, reach = reach[:count], reach[count:]
        yield own.tolist()
