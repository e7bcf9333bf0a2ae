"""Response lengths of a step, from its rollouts file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyarrow import ArrowException

from services.gateway.schema import LengthBin, Lengths
from services.report.rollouts_file import read_columns, rollouts_path
from services.report.run_data import quantile

MAX_BINS = 24
NONE = Lengths(step=None, count=0, p50=None, p90=None, p99=None, longest=None, bins=())


def bins_of(lengths: Sequence[int], truncated: Sequence[bool]) -> tuple[LengthBin, ...]:
    """Equal bins of a round width from 1 to the longest response."""
    longest = max(lengths, default=0)
    width = next(w for e in range(9) for w in (10**e, 2 * 10**e, 5 * 10**e) if w * MAX_BINS >= longest)
    counts = [[0, 0] for _ in range(max(1, -(-longest // width)))]
    for length, cut in zip(lengths, truncated, strict=True):
        at = counts[max(0, length - 1) // width]
        at[0] += 1
        at[1] += cut
    return tuple(LengthBin(low=i * width + 1, high=(i + 1) * width, count=n, truncated=t)
                 for i, (n, t) in enumerate(counts))  # fmt: skip


def read_lengths(folder: Path, step: int) -> Lengths | None:
    """Of one step; None when it has no file (yet), or one that cannot be read."""
    try:
        rows = read_columns(rollouts_path(folder, step), ["response_len", "finish_reason"])
    except (FileNotFoundError, ArrowException):
        return None
    lengths = [int(r["response_len"]) for r in rows]
    if not lengths:
        return Lengths(step=step, count=0, p50=None, p90=None, p99=None, longest=None, bins=())
    return Lengths(
        step=step,
        count=len(lengths),
        p50=quantile(lengths, 0.5),
        p90=quantile(lengths, 0.9),
        p99=quantile(lengths, 0.99),
        longest=max(lengths),
        bins=bins_of(lengths, [r["finish_reason"] == "length" for r in rows]),
    )
