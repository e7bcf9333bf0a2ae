"""Drafting with the EAGLE drafter on the engine's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from services.models.drafter import draft_forward, drafter_names, drafter_spec, fuse_drafter
from services.models.layers import LayerWeights
from services.models.sampling import SamplingTensors
from services.models.target import check_tensors
from services.rollout.rows import Rows, causal_tail, tail_mask
from services.speculation.drafting import Draft, draw_children
from services.speculation.strategy import DraftStrategy

CATCH_UP_CHUNK = 128  # columns of one catch-up pass: bounds its padding and its mask


class EagleDrafting:
    """Holds one drafter version; embedding and LM head are the target's, read at use, so a policy load reaches both."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._target = rows, rows.target
        self._spec = drafter_spec(rows.target.spec)
        self._fc: Tensor | None = None
        self._layer: LayerWeights | None = None

    @property
    def ready(self) -> bool:
        return self._layer is not None

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Adopt a drafter version, all or nothing. Drafter keys/values of running rows are rebuilt when next needed."""
        check_tensors(tensors, drafter_names(self._target.spec), "drafter")
        moved = {k: v.detach().to(self._target.device, self._target.dtype, copy=True) for k, v in tensors.items()}
        self._fc, self._layer = moved["fc.weight"], fuse_drafter(moved, self._target.spec)
        self._rows.drafted[:] = 0

    @torch.no_grad()
    def propose(
        self, strategy: DraftStrategy, sampling: SamplingTensors, uniforms: Callable[[int], Tensor]
    ) -> Draft:
        """Draft for all rows. `uniforms(n)` gives float64 [count,n] fresh numbers."""
        shape, rows = strategy.shape, self._rows
        hidden = self._catch_up()
        numbers = uniforms(shape.num_nodes - 1) if strategy.sampled else None
        tokens = torch.zeros(rows.count, shape.num_nodes, dtype=torch.long, device=hidden.device)
        outputs: dict[int, Tensor] = {0: hidden}
        probs: list[Tensor | None] = [None] * shape.num_nodes
        expanded: list[int] = []  # inner nodes below the root, in the order of their drafter columns
        for level in shape.levels:
            inner = [n for n in level if n]
            if inner:
                self._run_level(inner, expanded, tokens, outputs, shape)
            for node in level:
                children = list(shape.children[node])
                picked = None if numbers is None else numbers[:, [c - 1 for c in children]]
                logits = self._target.logits(outputs[node])
                drawn, drawn_from = draw_children(logits, sampling, len(children), strategy.sampled, picked)
                tokens[:, children] = drawn
                for i, child in enumerate(children):
                    probs[child] = None if drawn_from is None else drawn_from[:, i]
        lengths = torch.full((rows.count,), shape.num_nodes - 1, device=hidden.device)
        found = [p for p in probs if p is not None]
        return Draft(shape, tokens[:, 1:], torch.stack(found, 1) if found else None, lengths)

    def _catch_up(self) -> Tensor:
        """Feed the drafter all (token, target hidden state) pairs it has not seen; the output of each row's last one,
        [count,H], predicts the hidden state behind the next token. The last entry is always run again: its output is
        not kept."""
        rows = self._rows
        last = rows.lengths[: rows.count] - 2
        assert (last >= 0).all(), "a prompt has at least two tokens here"
        while True:
            start = torch.from_numpy(rows.drafted[: rows.count].clip(max=last)).to(self._target.device)
            final = torch.from_numpy(last).to(self._target.device)
            width = min(int((final - start).max()) + 1, CATCH_UP_CHUNK)
            out = self._extend(start, width)
            rows.drafted[: rows.count] = (start + width).clamp_max(final + 1).cpu().numpy()
            if int((final - start).max()) < width:
                # rows that were done in an earlier chunk start at their last entry again, so every row ends here
                return out[torch.arange(rows.count, device=out.device), final - start]

    def _extend(self, start: Tensor, width: int) -> Tensor:
        """Entries start..start+width-1 of each row, padded past its end with columns that later writes cover."""
        rows = self._rows
        at = start[:, None] + torch.arange(width, device=start.device)
        index = rows.row_index()
        embeds = F.embedding(rows.tokens[index, at + 1], self._target.weights.embed)
        return self._forward(embeds, rows.hidden[index, at], at, at, causal_tail(start, width, self._target.dtype))

    def _run_level(self, inner: list[int], expanded: list[int], tokens: Tensor, outputs: dict[int, Tensor], shape) -> None:
        """One drafter pass over the inner nodes of a level. Node of depth d sits at position base + d - 1."""
        rows = self._rows
        base = rows.base()
        column = {n: i for i, n in enumerate([*expanded, *inner])}
        tail = torch.zeros(len(inner), len(column), dtype=torch.bool, device=base.device)
        for i, node in enumerate(inner):
            tail[i, [column[a] for a in shape.ancestors(node)[1:]]] = True
        write_at = base[:, None] + torch.tensor([column[n] for n in inner], device=base.device)
        position = base[:, None] + torch.tensor([shape.depths[n] - 1 for n in inner], device=base.device)
        mask = tail_mask(base, tail, int(base.max()) + len(column), self._target.dtype)
        hidden = torch.stack([outputs[shape.parents[n]] for n in inner], dim=1)
        embeds = F.embedding(tokens[:, inner], self._target.weights.embed)
        out = self._forward(embeds, hidden, position, write_at, mask)
        outputs.update({node: out[:, i] for i, node in enumerate(inner)})
        expanded.extend(inner)

    def _forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, write_at: Tensor, mask: Tensor) -> Tensor:
        assert self._fc is not None and self._layer is not None, "load a drafter version first"
        rope = self._target.rope.at(positions)
        attend = self._rows.draft_kv.attend(0, write_at, mask)
        return draft_forward(self._fc, self._layer, self._spec, embeds, hidden, rope, attend)
