"""Whether a candidate drafts better than the drafter that is served: decided on sequences that neither was trained on.
Pure.

Both are asked about the same places, so their difference is what counts, and it is judged against its own spread: an
exam has few responses, and who tries often enough passes one by luck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SURE = 2.0  # standard errors


@dataclass(frozen=True, slots=True)
class Piece:
    """Sums of the expected tokens per verify step over `starts` places, by drafter."""

    starts: int
    served: float
    candidate: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`gain`: of the candidate's acceptance length, relative to the served one's; `error`: its standard error."""

    gain: float
    error: float
    decision: Literal["better", "open", "worse"]


def judge(pieces: Sequence[Piece], min_gain: float) -> Verdict:
    """`better` and `worse` by at least `min_gain` and SURE standard errors; `open` with fewer than two pieces. The
    error is that of a ratio of sums over pieces (Cochran 1977, section 6.4), taken as independent. A candidate whose
    numbers are not finite is `worse`."""
    served = sum(p.served for p in pieces)
    if len(pieces) < 2 or served <= 0:
        return Verdict(0.0, math.inf, "open")
    gain = sum(p.candidate - p.served for p in pieces) / served
    left = sum((p.candidate - p.served - gain * p.served) ** 2 for p in pieces)
    error = math.sqrt(left * len(pieces) / (len(pieces) - 1)) / served
    if not math.isfinite(gain):
        return Verdict(gain, math.inf, "worse")
    if abs(gain) <= max(min_gain, SURE * error):
        return Verdict(gain, error, "open")
    return Verdict(gain, error, "better" if gain > 0 else "worse")
