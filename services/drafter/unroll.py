"""The drafter run several draft depths deep, as the engine will run it (EAGLE-3's "training-time test", HASS).

Entry t of depth 0 sees true target states only. Entry t of depth j continues the chain that started at
s = t - j: its input is the drafter's own output of depth j - 1 at t - 1, and it attends

    depth-0 keys/values of entries <= s        the engine's drafter context, from true target states
    depth-i keys/values of entry s + i, 1 <= i <= j        the chain's own drafts, on a diagonal

An entry's rotary position is its index at every depth. All chains of a row run at once: depth j is one forward pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from services.drafter.packing import DraftRows
from services.models.drafter import Drafter
from services.models.layers import Attend, RopeTable, masked_attention
from services.models.packing import additive


def unroll(drafter: Drafter, rows: DraftRows, embed: Tensor, rope: RopeTable, depths: int) -> list[Tensor]:
    """Predicted hidden states of depths 0..depths-1, each [R,W,H], to compare with `rows.target_hidden`.

    `embed` is the target's [V,H] and gets no gradient. Entries whose chain would start before their sequence
    (`rows.started(j)` false) hold meaningless numbers, which no other entry ever reads.
    """
    network = drafter.network()
    embeds = F.embedding(rows.ids, embed.detach())
    turns = rope.at(rows.layout.positions)
    attention = _ChainAttention(rows)
    hidden, outputs = network.enter(rows.inputs), []
    for depth in range(depths):
        out = network.step(embeds, hidden, turns, attention.at(depth))
        outputs.append(out.predicted)
        hidden = _shift(out.hidden)
    return outputs


def _shift(x: Tensor) -> Tensor:
    """[R,W,...] one entry later; entry 0 gets zeros."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


class _ChainAttention:
    """Keys and values of the depths so far. `_drafted[i-1]` is depth i's, shifted so that entry t holds what the chain
    arriving at t wrote at that depth."""

    def __init__(self, rows: DraftRows) -> None:
        self._rows = rows
        self._context: Tensor | None = None
        self._drafted: list[Tensor] = []

    def at(self, depth: int) -> Attend:
        return self._first if depth == 0 else self._later

    def _first(self, q: Tensor, kv: Tensor) -> Tensor:
        self._context = kv
        return masked_attention(q, kv[:, :, 0], kv[:, :, 1], additive(self._rows.visible(0), q.dtype))

    def _later(self, q: Tensor, kv: Tensor) -> Tensor:
        """q [R,W,N,D], kv [R,W,2,M,D] -> [R,W,N,D]: softmax over W context keys and `depth` diagonal ones."""
        assert self._context is not None
        self._drafted = [*(_shift(d) for d in self._drafted), kv]
        depth, heads = len(self._drafted), self._context.shape[3]
        drafted = torch.stack(self._drafted, dim=-1)  # [R,W,2,M,D,depth]
        grouped = q.reshape(*q.shape[:2], heads, -1, q.shape[-1]) * q.shape[-1] ** -0.5  # [R,W,M,G,D]
        far = torch.einsum("rtmgd,rsmd->rmgts", grouped, self._context[:, :, 0])
        near = torch.einsum("rtmgd,rtmdj->rmgtj", grouped, drafted[:, :, 0])
        # `near` needs no mask: only an entry without a chain meets shifted-in zeros or a neighbour's drafts there, and
        # nothing reads what such an entry holds
        far = far.masked_fill(~self._rows.visible(depth)[:, None, None], -torch.inf)
        weights = torch.cat([far, near], dim=-1).softmax(-1)
        width = far.shape[-1]
        mixed = torch.einsum("rmgts,rsmd->rtmgd", weights[..., :width], self._context[:, :, 1])
        mixed = mixed + torch.einsum("rmgtj,rtmdj->rtmgd", weights[..., width:], drafted[:, :, 1])
        return mixed.flatten(2, 3)
