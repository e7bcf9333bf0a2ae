"""Drawing draft tokens from the drafter's distribution: one child, or several siblings without replacement; and putting
drafts of several origins into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.models.sampling import SamplingTensors, draw, process_logits
from services.speculation.tree import TreeShape, chain


@dataclass(frozen=True)
class Draft:
    """What goes to verification. `tokens` [B,Q-1] for nodes 1..Q-1 of `shape`; `probs` [B,Q-1,V] the distribution each
    was drawn from, or None for one-hot drafts; `lengths` [B] valid tokens per row: nodes past them are not offered."""

    shape: TreeShape
    tokens: Tensor
    probs: Tensor | None
    lengths: Tensor

    @cached_property
    def offered(self) -> list[int]:
        """`lengths` on the host: the one copy of a round."""
        counts: list[int] = self.lengths.tolist()
        return counts


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


def one_hot_chains(rows: Sequence[Sequence[int]], device: torch.device) -> Draft:
    """Ragged chains of tokens that no chance chose."""
    longest = max(map(len, rows))
    padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.long, device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return Draft(chain(longest), padded.reshape(len(rows), longest), None, lengths)


def appended(drawn: Draft, rows: Sequence[Sequence[int]]) -> Draft:
    """Chains `drawn` from a drafter (their lengths [B] say how much of each counts), continued by `rows`: tokens that
    no chance chose, one-hot where there are `probs`.

    Lossless, though what is appended may depend on the tokens drawn: verification comes to a token only when it has
    accepted all before it, and given those the token and its distribution are fixed. Whether a row is drawn at all and
    how long it is must not depend on what would have been drawn: a chain kept for its luck is accepted too often.
    """
    device = drawn.tokens.device
    heads = [row[:n] for row, n in zip(drawn.tokens.tolist(), drawn.offered, strict=True)]
    out = one_hot_chains([[*head, *row] for head, row in zip(heads, rows, strict=True)], device)
    if drawn.probs is None:
        return out
    probs = torch.zeros(*out.tokens.shape, drawn.probs.shape[-1], dtype=drawn.probs.dtype, device=device)
    probs.scatter_(-1, out.tokens[..., None], 1.0)
    width = min(drawn.tokens.shape[1], out.tokens.shape[1])
    own = torch.arange(width, device=device) < drawn.lengths[:, None]
    probs[:, :width] = torch.where(own[..., None], drawn.probs[:, :width], probs[:, :width])
    return Draft(out.shape, out.tokens, probs, out.lengths)
