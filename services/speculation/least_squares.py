"""Least squares with coefficients that cannot be negative, small and dense: a cost falls with nothing."""

from __future__ import annotations

from collections.abc import Sequence

_SWEEPS = 2000
_ENOUGH = 1e-7  # relative movement of a sweep below which the answer stands still
_RIDGE = 1e-6  # of a column's own square: decides between columns that the rows cannot tell apart


def nonnegative(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The x >= 0 with the least |rows · x - wanted|², by coordinate descent on the normal equations (convex, so any
    order converges). Columns are scaled to length one first; a column of zeros gets zero."""
    width = len(rows[0])
    scale = [sum(row[j] ** 2 for row in rows) ** 0.5 for j in range(width)]
    used = [j for j in range(width) if scale[j] > 0]
    gram = [[sum(r[i] * r[j] for r in rows) / (scale[i] * scale[j]) for j in used] for i in used]
    right = [sum(r[j] * w for r, w in zip(rows, wanted, strict=True)) / scale[j] for j in used]
    x = _descend(gram, right)
    found = [0.0] * width
    for j, value in zip(used, x, strict=True):
        found[j] = value / scale[j]
    return found


def _descend(gram: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    x = [0.0] * len(right)
    for _ in range(_SWEEPS):
        moved = 0.0
        for j, line in enumerate(gram):
            rest = right[j] - sum(g * v for g, v in zip(line, x, strict=True)) + line[j] * x[j]
            new = max(0.0, rest / (line[j] * (1 + _RIDGE)))
            moved, x[j] = max(moved, abs(new - x[j])), new
        if moved <= _ENOUGH * max(1.0, *x):
            break
    return x
