"""Lossless verification of drafts: what is committed has exactly the target's processed distribution.

Chains: speculative sampling (Leviathan et al. 2023; Chen et al. 2023): accept draft token x with probability
min(1, target_probs[x] / draft_probs[x]); at the first rejection draw from max(target_probs - draft_probs, 0),
normalised. Trees: recursive rejection over siblings (Miao et al. 2024, SpecInfer; Jeon et al. 2024): each rejected
sibling leaves the residual as the new target for the next one. Our deviation: draws are inverse-CDF with uniforms
handed in, so that the functions are deterministic and can be enumerated exactly.

Drafts drawn from the drafter come with `draft_probs`; argmax and suffix drafts are one-hot (`draft_probs` None): they
are accepted with the target's probability of that one token, and the residual is the target without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.models.sampling import draw
from services.speculation.drafting import Draft
from services.speculation.tree import TreeShape

EXACT = 1.0


@dataclass(frozen=True)
class Verified:
    """`num_accepted_tokens` [B], bonus excluded; `path` [B,depth] node index of the j-th accepted token (padded with
    the last accepted node, 0 when none); `next_token` [B], the bonus or the residual draw."""

    num_accepted_tokens: Tensor
    path: Tensor
    next_token: Tensor

    @cached_property
    def accepted(self) -> list[int]:
        """`num_accepted_tokens` on the host: the one copy of a round."""
        counts: list[int] = self.num_accepted_tokens.tolist()
        return counts


def leading_accepts(accept: Tensor) -> Tensor:
    """bool [B,n] -> [B]: accepted tokens before the first rejection; what follows it does not count (row 8)."""
    return accept.long().cumprod(-1).sum(-1)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(target_probs - draft_probs, 0) normalised, [...,V]. Where nothing is left (equal distributions, so that a
    rejection has probability zero) the target itself."""
    rest = (target_probs - draft_probs).clamp_min(0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp_min(torch.finfo(rest.dtype).tiny), target_probs)


def _accepts(target_prob: Tensor, draft_prob: Tensor, uniforms: Tensor, accept_threshold: float) -> Tensor:
    """u < target_prob / draft_prob without the division; a token the drafter could not have drawn is refused."""
    accept = (uniforms * draft_prob < target_prob) & (draft_prob > 0)
    if accept_threshold < EXACT:  # lossy, gated by speculation.allow_lossy
        accept |= (target_prob >= accept_threshold) & (draft_prob > 0)
    return accept


def verify_chain(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    draft_lengths: Tensor,
    uniforms: Tensor,
    accept_threshold: float = EXACT,
) -> Verified:
    """target_probs [B,n+1,V] (position j: after j draft tokens), draft_tokens [B,n], draft_probs [B,n,V] or None,
    draft_lengths [B] in 0..n (0: an ordinary decode step), uniforms float64 [B,n+1]."""
    rows, n = draft_tokens.shape
    target_prob = target_probs[:, :n].gather(-1, draft_tokens[..., None])[..., 0]
    if draft_probs is None:
        draft_prob = torch.ones_like(target_prob)
    else:
        draft_prob = draft_probs.gather(-1, draft_tokens[..., None])[..., 0]
    offered = torch.arange(n, device=draft_tokens.device) < draft_lengths[:, None]
    accepted = leading_accepts(_accepts(target_prob, draft_prob, uniforms[:, :n], accept_threshold) & offered)
    row = torch.arange(rows, device=draft_tokens.device)
    final = target_probs[row, accepted]
    rejected = accepted < draft_lengths
    if n:
        at = accepted.clamp_max(n - 1)
        if draft_probs is None:
            refused = torch.zeros_like(final).scatter_(-1, draft_tokens[row, at][:, None], 2.0)
        else:
            refused = draft_probs[row, at]
        final = torch.where(rejected[:, None], residual(final, refused), final)
    path = torch.arange(1, n + 1, device=draft_tokens.device).expand(rows, n)
    return Verified(accepted, torch.minimum(path, accepted[:, None]), draw(final, uniforms[:, n]))


def verify_tree(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    draft_lengths: Tensor,
    shape: TreeShape,
    uniforms: Tensor,
    accept_threshold: float = EXACT,
) -> Verified:
    """target_probs [B,Q,V] per node, draft_tokens [B,Q-1] for nodes 1..Q-1, draft_probs [B,Q-1,V] (for each node the
    distribution it was drawn from, earlier siblings taken out) or None, draft_lengths [B] in 0..Q-1: nodes past a row's
    are not offered, which leaves that row a smaller tree; uniforms float64 [B,Q]."""
    rows, nodes = target_probs.shape[:2]
    current = torch.zeros(rows, dtype=torch.long, device=target_probs.device)
    accepted = torch.zeros_like(current)
    path = torch.zeros(rows, shape.depth, dtype=torch.long, device=target_probs.device)
    rest = target_probs[:, 0]
    for node in range(1, nodes):
        token = draft_tokens[:, node - 1, None]
        target_prob = rest.gather(-1, token)[:, 0]
        if draft_probs is None:
            draft_prob, refused = torch.ones_like(target_prob), torch.zeros_like(rest).scatter_(-1, token, 2.0)
        else:
            refused = draft_probs[:, node - 1]
            draft_prob = refused.gather(-1, token)[:, 0]
        asked = (current == shape.parents[node]) & (node <= draft_lengths)
        accept = asked & _accepts(target_prob, draft_prob, uniforms[:, node - 1], accept_threshold)
        left = residual(rest, refused)
        rest = torch.where((asked & ~accept)[:, None], left, rest)
        rest = torch.where(accept[:, None], target_probs[:, node], rest)
        level = shape.depths[node] - 1
        path[:, level] = torch.where(accept, node, path[:, level])
        current, accepted = torch.where(accept, node, current), accepted + accept.long()
    step = torch.arange(shape.depth, device=path.device)
    path = torch.where(step < accepted[:, None], path, current[:, None])
    return Verified(accepted, path, draw(rest, uniforms[:, nodes - 1]))


def count_tries(draft: Draft, verified: Verified, kept: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(tried, accepted, cut) as in RoundOutcome, two of them by position; `kept`: tokens that were committed. In a tree
    a path may end at a node without children: nothing was tried behind it."""
    children, paths = draft.shape.children, verified.path.tolist()
    tried, accepted = [0] * draft.shape.depth, [0] * draft.shape.depth
    for count, length, path in zip(verified.accepted, draft.offered, paths, strict=True):
        for k in range(count):
            accepted[k] += 1
            tried[k] += 1
        if any(child <= length for child in children[path[count - 1] if count else 0]):
            tried[count] += 1
    return tuple(tried), tuple(accepted), len(paths) + sum(accepted) - kept
