"""Drawing draft tokens from the drafter's distribution: one child, or several siblings without replacement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.models.sampling import SamplingTensors, draw, process_logits
from services.speculation.tree import TreeShape


@dataclass(frozen=True)
class Draft:
    """What goes to verification. `tokens` [B,Q-1] for nodes 1..Q-1 of `shape`; `probs` [B,Q-1,V] the distribution each
    was drawn from, or None for one-hot drafts; `lengths` [B] valid tokens per row (chains may be ragged)."""

    shape: TreeShape
    tokens: Tensor
    probs: Tensor | None
    lengths: Tensor


def draw_children(
    logits: Tensor, sampling: SamplingTensors, count: int, sampled: bool, uniforms: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """logits float32 [N,V] -> tokens [N,count] and, when sampled, the distribution of each draw [N,count,V].

    Sampled siblings are drawn one after another from what the earlier ones left (uniforms float64 [N,count]). A greedy
    row, or one whose distribution has fewer tokens than `count`, gets distributions that sum to zero for the surplus:
    verification refuses those. Greedy rows take their siblings from the top of the logits instead, as one-hot.
    """
    if not sampled or uniforms is None:
        return logits.topk(count, dim=-1).indices, None
    probs = process_logits(logits, sampling).softmax(-1)
    tokens, drawn_from = [], []
    for i in range(count):
        token = draw(probs, uniforms[:, i]).clamp_max(logits.shape[-1] - 1)
        tokens.append(token)
        drawn_from.append(probs)
        if i + 1 < count:
            probs = _without(probs, token)
    out, out_probs = torch.stack(tokens, 1), torch.stack(drawn_from, 1)
    return _greedy_siblings(logits, sampling, out, out_probs) if sampling.any_greedy and count > 1 else (out, out_probs)


def _without(probs: Tensor, token: Tensor) -> Tensor:
    """What is left, normalised; nothing where that is too little to divide by. A sibling recorded with less than the
    probability it was drawn with would be accepted too often."""
    left = probs.scatter(-1, token[:, None], 0.0)
    total, least = left.sum(-1, keepdim=True), torch.finfo(left.dtype).tiny
    return torch.where(total >= least, left / total.clamp_min(least), torch.zeros_like(left))


def _greedy_siblings(logits: Tensor, sampling: SamplingTensors, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    best = logits.topk(tokens.shape[1], dim=-1).indices
    one_hot = torch.zeros_like(probs).scatter_(-1, best[..., None], 1.0)
    greedy = (sampling.temperature == 0)[:, None]
    return torch.where(greedy, best, tokens), torch.where(greedy[..., None], one_hot, probs)
