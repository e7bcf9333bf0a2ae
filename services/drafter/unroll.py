"""The drafter run several draft depths deep, as the engine will run it (EAGLE-3's "training-time test", HASS).

Entry t of depth 0 sees true target states only. Entry t of depth j continues the chain that started at
s = t - j: its input is the drafter's own output of depth j - 1 at t - 1, and it attends

    depth-0 keys/values of entries <= s        the engine's drafter context, from true target states
    depth-i keys/values of entry s + i, 1 <= i <= j        the chain's own drafts, on a diagonal

An entry's rotary position is its index at every depth. All chains of a row run at once: depth j is one forward pass.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from services.drafter.chains import Group, chain_attention
from services.drafter.packing import DraftRows
from services.models.drafter import Drafter
from services.models.layers import Attend, RopeTable


def unroll(drafter: Drafter, rows: DraftRows, embed: Tensor, rope: RopeTable, depths: int) -> list[Tensor]:
    """Predicted hidden states of depths 0..depths-1, each [R,W,H], to compare with `rows.target_hidden`.

    `embed` is the target's [V,H] and gets no gradient. Entries whose chain would start before their sequence
    (`rows.started(j)` false) hold meaningless numbers, which no other entry ever reads.
    """
    network = drafter.network()
    embeds = F.embedding(rows.ids, embed.detach())
    turns = rope.at(rows.layout.positions)
    attention = _Chains(rows)
    hidden, outputs = network.enter(rows.inputs), []
    for depth in range(depths):
        out = network.step(embeds, hidden, turns, attention.at(depth))
        outputs.append(out.predicted)
        hidden = _shift(out.hidden)
    return outputs


def _shift(x: Tensor) -> Tensor:
    """[R,W,...] one entry later; entry 0 gets zeros."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


class _Chains:
    """Keys and values of the depths so far. `_drafted[i-1]` is depth i's, shifted so that entry t holds what the chain
    arriving at t wrote at that depth."""

    def __init__(self, rows: DraftRows) -> None:
        self._rows = rows
        self._context: Tensor | None = None
        self._drafted: list[Tensor] = []

    def at(self, depth: int) -> Attend:
        return partial(self._attend, self._rows.chains(depth))

    def _attend(self, groups: list[Group], q: Tensor, kv: Tensor) -> Tensor:
        """q [R,W,N,D], kv [R,W,2,M,D] -> [R,W,N,D]: softmax over the context's keys and the chain's own. An entry
        without a chain meets shifted-in zeros or a neighbour's drafts, and nothing reads what it holds."""
        near = None
        if self._context is None:
            self._context = kv.flatten(0, 1)
        else:
            self._drafted = [*(_shift(d) for d in self._drafted), kv]
            near = torch.stack(self._drafted, dim=-1).flatten(0, 1)  # [R*W,2,M,D,depth]
        return chain_attention(q.flatten(0, 1), self._context, near, groups).view(q.shape)
