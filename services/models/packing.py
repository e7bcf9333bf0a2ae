"""Several sequences per row: who sits where.

A batch is as wide as its longest sequence and shorter ones share rows of that width; sequences of similar length meet
in one batch. Used by policy and drafter training alike, whose attention keeps the sequences of a row apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowPlan:
    """One batch: `rows[r]` lists the indices of the sequences in row r, in order; every row is `width` tokens wide."""

    rows: tuple[tuple[int, ...], ...]
    width: int

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(i for row in self.rows for i in row)


def plan_rows(lengths: Sequence[int], budget: int) -> list[RowPlan]:
    """Split sequences into batches of at most `budget` tokens, padding included; longest first, each row filled up.

    A sequence longer than `budget` gets a batch of its own. Sequences of length 0 are left out. Each other index
    appears in exactly one batch.
    """
    plans: list[RowPlan] = []
    rows: list[list[int]] = []
    free: list[int] = []
    width = 0
    for i in sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: (-lengths[i], i)):
        fits = next((r for r, room in enumerate(free) if room >= lengths[i]), None)
        if fits is None and rows and (len(rows) + 1) * width > budget:
            plans.append(RowPlan(tuple(map(tuple, rows)), width))
            rows, free = [], []
        if fits is None:
            width = lengths[i] if not rows else width
            rows.append([])
            free.append(width)
            fits = len(rows) - 1
        rows[fits].append(i)
        free[fits] -= lengths[i]
    if rows:
        plans.append(RowPlan(tuple(map(tuple, rows)), width))
    return plans


@dataclass(frozen=True)
class RowLayout:
    """positions [R,W]: place of each token within its own sequence; segments [R,W]: which sequence of the row it
    belongs to, -1 where nothing sits; `starts[i]` = (row, column) of the first token of the plan's i-th member."""

    positions: Tensor
    segments: Tensor
    starts: tuple[tuple[int, int], ...]

    @property
    def filled(self) -> Tensor:
        return self.segments >= 0

    @property
    def begins(self) -> list[int]:
        """`starts` in the rows laid end to end."""
        width = self.segments.shape[1]
        return [row * width + column for row, column in self.starts]

    def to(self, device: torch.device) -> RowLayout:
        return RowLayout(self.positions.to(device), self.segments.to(device), self.starts)


def row_layout(plan: RowPlan, lengths: Sequence[int]) -> RowLayout:
    positions = torch.zeros(len(plan.rows), plan.width, dtype=torch.int64)
    segments = torch.full((len(plan.rows), plan.width), -1, dtype=torch.int64)
    starts: list[tuple[int, int]] = []
    for r, row in enumerate(plan.rows):
        column = 0
        for place, i in enumerate(row):
            end = column + lengths[i]
            positions[r, column:end] = torch.arange(lengths[i])
            segments[r, column:end] = place
            starts.append((r, column))
            column = end
    return RowLayout(positions, segments, tuple(starts))


def fill_rows(layout: RowLayout, parts: Sequence[Tensor]) -> Tensor:
    """Lay the members' tensors [T_i, ...] (in member order) into [R, W, ...], zeros where nothing sits."""
    out = parts[0].new_zeros(layout.segments.shape + parts[0].shape[1:])
    for (row, column), part in zip(layout.starts, parts, strict=True):
        out[row, column : column + part.shape[0]] = part
    return out
