"""Drafting with the EAGLE drafter on the engine's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.models.drafter import DraftNetwork
from services.models.eagle import Eagle
from services.models.layers import decoding_layout, layer_for_decoding
from services.models.sampling import SamplingTensors
from services.models.target import check_tensors
from services.rollout.rows import Rows, causal_tail, tail_mask, tail_table
from services.speculation.drafting import Draft, draw_children
from services.speculation.tree import TreeShape, level_order

CATCH_UP_CHUNK = 128  # columns of one catch-up pass: bounds its padding and its mask
NEAR = 16  # a row that misses at most so many entries gets them in the round's own pass over all rows


@dataclass(frozen=True)
class CaughtUp:
    """`hidden` [count,H] predicts each row's hidden state behind its next token, where `ready`."""

    hidden: Tensor
    ready: list[bool]


@dataclass(frozen=True)
class Level:
    """One drafter pass. `nodes` have children to draw; `inner` are those below the root, which the pass runs on, with
    their `parents`, drafter `columns` and position `offsets` behind the root, and the mask `table` of `tail_table`."""

    nodes: tuple[int, ...]
    inner: list[int]
    parents: tuple[int, ...]
    columns: Tensor
    offsets: Tensor
    table: Tensor


@dataclass(frozen=True)
class DraftPlan:
    """`shape` with its nodes in drawing order: siblings next to each other, level by level."""

    shape: TreeShape
    levels: tuple[Level, ...]


@lru_cache(maxsize=64)
def draft_plan(shape: TreeShape, dtype: torch.dtype, device: torch.device) -> DraftPlan:
    """Everything about drafting a shape that does not depend on the round."""
    shape = level_order(shape)
    column: dict[int, int] = {}
    levels = []
    for nodes in shape.levels:
        inner = [n for n in nodes if n]
        column.update({n: len(column) + i for i, n in enumerate(inner)})
        tail = torch.zeros(len(inner), len(column), dtype=torch.bool, device=device)
        for i, node in enumerate(inner):
            tail[i, [column[a] for a in shape.ancestors(node)[1:]]] = True
        levels.append(
            Level(
                nodes=nodes,
                inner=inner,
                parents=tuple(shape.parents[n] for n in inner),
                columns=torch.tensor([column[n] for n in inner], dtype=torch.long, device=device),
                offsets=torch.tensor([shape.depths[n] - 1 for n in inner], dtype=torch.long, device=device),
                table=tail_table(tail, dtype),
            )
        )
    return DraftPlan(shape, tuple(levels))


def runs(chosen: np.ndarray) -> Iterator[tuple[int, int]]:
    """Neighbouring True values of bool [n] as (first, end)."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


class EagleDrafting:
    """Holds one drafter version; embedding and LM head are the target's, read at use, so a policy load reaches both."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._target = rows, rows.target
        self._method = Eagle(rows.target.spec)
        self._network: DraftNetwork | None = None

    @property
    def ready(self) -> bool:
        return self._network is not None

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Adopt a drafter version, all or nothing. Drafter keys/values of running rows are rebuilt when next needed."""
        check_tensors(tensors, self._method.names(), "drafter")
        moved = {k: v.detach().to(self._target.device, self._target.dtype, copy=True) for k, v in tensors.items()}
        network = self._method.network(moved)
        fc, layer = decoding_layout(network.fc), layer_for_decoding(network.layer)
        self._network = replace(network, fc=fc, layer=layer)
        self._rows.drafted[:] = 0

    @torch.no_grad()
    def propose(
        self,
        shape: TreeShape,
        sampled: bool,
        hidden: Tensor,
        lengths: Sequence[int],
        sampling: SamplingTensors,
        uniforms: Callable[[int], Tensor],
    ) -> Draft:
        """Draft from what `catch_up` gave. `lengths`: by row, how many nodes are offered; the passes run on all rows,
        since those lie dense. `uniforms(n)` gives float64 [count,n] fresh numbers."""
        rows, plan = self._rows, draft_plan(shape, self._target.dtype, self._target.device)
        base = rows.base()
        numbers = uniforms(plan.shape.num_nodes - 1) if sampled else None
        tokens = torch.zeros(rows.count, plan.shape.num_nodes, dtype=torch.long, device=hidden.device)
        outputs: dict[int, Tensor] = {0: hidden}
        probs: list[Tensor] = []
        for level in plan.levels:
            if level.inner:
                self._run_level(level, base, tokens, outputs)
            for node in level.nodes:
                first, last = plan.shape.children[node][0], plan.shape.children[node][-1] + 1
                picked = None if numbers is None else numbers[:, first - 1 : last - 1]
                logits = self._target.logits(outputs[node])
                drawn, drawn_from = draw_children(logits, sampling, last - first, sampled, picked)
                tokens[:, first:last] = drawn
                if drawn_from is not None:
                    probs.append(drawn_from)
        offered = torch.tensor(lengths, device=hidden.device)
        return Draft(plan.shape, tokens[:, 1:], torch.cat(probs, 1) if probs else None, offered)

    def missing(self) -> np.ndarray:
        """Entries by row that the drafter must see before it drafts: (token, target hidden state) pairs that are new
        to it, and the last one in any case, whose output is not kept. [count]"""
        last = self._last()
        return last + 1 - self._start(last)

    def _last(self) -> np.ndarray:
        """The last entry of each row; -1 for a prompt of one token, which has none before its first round."""
        return self._rows.lengths[: self._rows.count] - 2

    def _start(self, last: np.ndarray) -> np.ndarray:
        return self._rows.drafted[: self._rows.count].clip(max=last.clip(min=0))

    @torch.no_grad()
    def feed(self, amounts: Sequence[int]) -> None:
        """Run the next entries of each row, so many of those it is missing. Rows lie dense: what would be padding in
        one of several neighbours brings it forward."""
        left = np.array(amounts)
        for first, end in runs(left > 0):
            while (most := int(left[first:end].max())) > 0:
                width = min(most, CATCH_UP_CHUNK)
                self._advance(first, end, width)
                left[first:end] -= width

    @torch.no_grad()
    def catch_up(self) -> CaughtUp:
        """Bring all rows that are missing at most NEAR entries to their ends, in one pass over all rows."""
        rows, missing = self._rows, self.missing()
        ready = (missing <= NEAR) & (self._last() >= 0)
        if not ready.any():
            return CaughtUp(rows.hidden[: rows.count, 0], ready.tolist())
        width = int(missing[ready].max())
        out = self._advance(0, rows.count, width)
        pick = torch.from_numpy((missing - 1).clip(0, width - 1)).to(out.device)
        return CaughtUp(out[torch.arange(rows.count, device=out.device), pick], ready.tolist())

    def _advance(self, first: int, end: int, width: int) -> Tensor:
        """The next `width` entries of rows first..end-1, padded past a row's last one with columns that later writes
        cover. Returns the outputs [end-first,width,H]."""
        rows, last = self._rows, self._last()
        start = self._start(last)[first:end]
        base = torch.from_numpy(start).to(self._target.device)
        at = base[:, None] + torch.arange(width, device=base.device)
        index = rows.row_index()[first:end]
        embeds = F.embedding(rows.tokens[index, at + 1], self._target.weights.embed)
        mask = causal_tail(base, width, int(start.max()) + width, self._target.dtype)
        out = self._forward(embeds, rows.hidden[index, at], at, at, mask, first)
        rows.drafted[first:end] = (start + width).clip(max=last[first:end] + 1)
        return out

    def _run_level(self, level: Level, base: Tensor, tokens: Tensor, outputs: dict[int, Tensor]) -> None:
        """One drafter pass over the inner nodes of a level. A node of depth d sits at position base + d - 1."""
        rows = self._rows
        write_at, position = base[:, None] + level.columns, base[:, None] + level.offsets
        mask = tail_mask(base, level.table, rows.longest() - 1 + level.table.shape[1] - 2)
        hidden = torch.stack([outputs[parent] for parent in level.parents], dim=1)
        embeds = F.embedding(tokens[:, level.inner], self._target.weights.embed)
        out = self._forward(embeds, hidden, position, write_at, mask)
        outputs.update({node: out[:, i] for i, node in enumerate(level.inner)})

    def _forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, write_at: Tensor, mask: Tensor, first_row: int = 0
    ) -> Tensor:
        assert self._network is not None, "load a drafter version first"
        rope = self._target.rope.at(positions)
        attend = self._rows.draft_kv.attend(0, write_at, mask, first_row)
        return self._network.step(embeds, hidden, rope, attend).hidden  # EAGLE's LM head takes the same
