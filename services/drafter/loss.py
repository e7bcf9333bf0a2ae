"""Drafter loss and expected acceptance, both from the unrolled drafter's predicted hidden states.

The target's distribution is head(target_hidden), the drafter's its draft head of `predicted`, which mostly is the
target's own. Embedding and head of the target get no gradient: only the drafter learns.

A draft head over some of the tokens draws none of the others: the acceptance probability is a sum over its own tokens,
exactly. Cross-entropy has to compare with the target's distribution over these tokens alone, as EAGLE-3 does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.drafter.objectives import CROSS_ENTROPY, OBJECTIVES, compared_at, draft_logprobs, target_logprobs
from services.drafter.packing import DraftRows
from services.models.drafter import DraftHead


@dataclass(frozen=True)
class LossTerms:
    """`objective`: a name of OBJECTIVES; `ce_weight` of cross-entropy is added to one about acceptance.
    `feature_weight`: of the smooth-L1 between hidden states, 0 for a method that only matches distributions. Depth j
    weighs decay^j. `temperature`: the run's."""

    objective: str
    feature_weight: float
    decay: float
    temperature: float
    ce_weight: float = 0.0


@dataclass(frozen=True)
class DrafterLoss:
    """`loss` is differentiable; `overlap` [depths], on its device: the sums over supervised entries of a depth of the
    expected acceptance sum_v min(target_probs, draft_probs)."""

    loss: Tensor
    overlap: Tensor


def supervised_counts(batches: Sequence[DraftRows], depths: int) -> list[int]:
    """Supervised entries of each depth over all batches of a micro-step: the divisors of `drafter_loss`."""
    return [sum(b.supervised.count(j) for b in batches) for j in range(depths)]


def drafter_loss(
    predicted: Sequence[Tensor],
    rows: DraftRows,
    head: Tensor,
    counts: Sequence[int],
    terms: LossTerms,
    draft_head: DraftHead | None = None,
) -> DrafterLoss:
    """This batch's share of the micro-step's loss: the mean over depths, weighted decay^j, of the objective between the
    target's distribution and the drafter's + feature_weight * smooth-L1 between hidden states, both averaged over
    supervised entries.

    predicted: [R,W,H] per depth; head [V,H] the target's; `draft_head` None: the same. `counts` over all batches of the
    micro-step, so that the sum of the shares does not depend on the packing. `overlap` is at the run's temperature,
    whatever the objective compares at.
    """
    head = head.detach()
    drafting = draft_head or DraftHead(head)
    hidden = _at(rows.target_hidden, rows.supervised.at(0, head.device)[0])
    target = F.linear(hidden, head).float()
    compare = _comparison(terms, target, drafting.ids)
    total, overlap = predicted[0].new_zeros(()), target.new_zeros(len(predicted))
    for j, whole in enumerate(predicted):
        places, among = rows.supervised.at(j, head.device)
        if not len(places):
            continue
        out = _at(whole, places)
        drafted = drafting.logits(out)
        part = compare(among, drafted)
        if terms.feature_weight:
            feature = F.smooth_l1_loss(out, hidden[among], reduction="sum") / out.shape[-1]
            part = part + terms.feature_weight * feature
        total = total + terms.decay**j / counts[j] * part
        overlap[j] = _overlap(target[among], drafted.detach(), terms.temperature, drafting.ids).sum()
    scale = sum(terms.decay**j for j, n in enumerate(counts) if n)
    return DrafterLoss(total / scale if scale else total, overlap)


def _at(t: Tensor, places: Tensor) -> Tensor:
    """[R,W,...] at [E] -> [E,...]. No place comes twice; indexing other than this would make sure of it by sorting."""
    return t.flatten(0, 1).index_select(0, places)


def _comparison(terms: LossTerms, target: Tensor, ids: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
    """(which of the rows of `target` [n,V], draft logits [n,D] for these) -> summed objective. What the depths share of
    the target's side is computed once."""
    mix = {terms.objective: 1.0}
    if terms.ce_weight and terms.objective != CROSS_ENTROPY:
        mix[CROSS_ENTROPY] = terms.ce_weight
    at = {name: compared_at(name, terms.temperature) for name in mix}
    wanted = {name: _wanted(name, target, at[name], ids) for name in mix}

    def compare(among: Tensor, drafted: Tensor) -> Tensor:
        total = drafted.new_zeros(())
        for name, weight in mix.items():
            total = total + weight * OBJECTIVES[name](wanted[name][among], draft_logprobs(drafted, at[name])).sum()
        return total

    return compare


def _wanted(name: str, target: Tensor, temperature: float, ids: Tensor | None) -> Tensor:
    """[n,V] -> [n,D] log-probabilities of the draft head's tokens: as they are where acceptance is compared, else (and
    for an argmax, which might lie outside) of a distribution over these tokens alone."""
    if ids is None:
        return target_logprobs(target, temperature)
    if name == CROSS_ENTROPY or not temperature:
        return target_logprobs(target[:, ids], temperature)
    return target_logprobs(target, temperature)[:, ids]


def expected_acceptance(
    predicted: Sequence[Tensor],
    rows: DraftRows,
    head: Tensor,
    temperature: float,
    draft_head: DraftHead | None = None,
) -> list[Tensor]:
    """Per depth [R,W]: the probability that the draft of this entry is accepted, sum_v min(target_probs, draft_probs)
    at `temperature`; 0 where nothing is supervised or no chain reaches (a chain cannot commit past the end)."""
    drafting = draft_head or DraftHead(head)
    target = F.linear(_at(rows.target_hidden, rows.supervised.at(0, head.device)[0]), head).float()
    result = []
    for j, out in enumerate(predicted):
        places, among = rows.supervised.at(j, head.device)
        alpha = torch.zeros(rows.loss_mask.shape, device=head.device)
        drafted = drafting.logits(_at(out, places))
        alpha.view(-1)[places] = _overlap(target[among], drafted, temperature, drafting.ids)
        result.append(alpha)
    return result


def chain_lengths(alphas: Sequence[Tensor], rows: DraftRows) -> Tensor:
    """Expected tokens per verify step for every supervised start entry s, flat:

        1 + sum_k prod_{j<=k} alpha_j[s + j]

    A product per start, then the mean over starts: easy and hard places do not average out inside the product.
    """
    return 1 + torch.stack(chain_reach(alphas, rows)).sum(0)


def chain_reach(alphas: Sequence[Tensor], rows: DraftRows) -> list[Tensor]:
    """For every supervised start entry s, flat, and each k: prod_{j<=k} alpha_j[s + j], the probability that the drafts
    of depths 0..k are all accepted."""
    product, reach = torch.ones_like(alphas[0]), []
    places, _ = rows.supervised.at(0, product.device)
    for j, alpha in enumerate(alphas):
        # entry s + j at place s; a neighbour's entries are cut off by `started`, which needs position >= j there
        own = torch.where(rows.started(j), alpha, 0.0)
        product = product * F.pad(own[:, j:], (0, min(j, own.shape[1])))
        reach.append(_at(product, places))
    return reach


def _overlap(target_logits: Tensor, draft_logits: Tensor, temperature: float, ids: Tensor | None) -> Tensor:
    """[n,V], [n,D] -> [n]. Temperature 0 compares the argmax tokens."""
    if temperature == 0:
        best = draft_logits.argmax(-1)
        return (target_logits.argmax(-1) == (best if ids is None else ids[best])).float()
    target, draft = (target_logits / temperature).softmax(-1), (draft_logits / temperature).softmax(-1)
    return torch.minimum(target if ids is None else target[:, ids], draft).sum(-1)
