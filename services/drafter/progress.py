"""Micro-steps of one `train` call folded into the record that the coordinator reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.core.types import BufferView, DrafterProgress
from services.drafter.buffer import HiddenStateBuffer
from services.drafter.trainer import MicroStep


def view(buffer: HiddenStateBuffer) -> BufferView:
    return BufferView(len(buffer), buffer.num_bytes, buffer.spilled_bytes, {c: n for c, n in buffer.lost.items() if n})


def summarise(
    steps: Sequence[MicroStep], total_steps: int, busy_s: float, buffer: HiddenStateBuffer
) -> DrafterProgress:
    """Means over the micro-steps that updated the drafter; loss NaN and no acceptance when none did."""
    done = [s for s in steps if s.updated]
    depths = range(len(done[0].expected_acceptance)) if done else range(0)
    return DrafterProgress(
        micro_steps=len(done),
        total_steps=total_steps,
        num_tokens=sum(s.num_tokens for s in done),
        loss=sum(s.loss for s in done) / len(done) if done else math.nan,
        expected_acceptance=tuple(_mean([s.expected_acceptance[k] for s in done]) for k in depths),
        busy_s=busy_s,
        buffer=view(buffer),
    )


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan
