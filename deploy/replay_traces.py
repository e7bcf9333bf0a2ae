"""Traces for `longtail bench selector`: how many requests run, how long they are, and how drafts are accepted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from deploy.replay import Law, Step

# At temperature 1 a small trained drafter has 0.67-0.70 per position with sampled drafts, one trained for long on its
# target's own rollouts up to 0.9.
GOOD, POSITIONS, FALL = 0.78, 12, 0.97
SUFFIX_FIRST, SUFFIX_NEXT = (0.1, 0.3), 0.65  # from nothing known of the group to siblings that ended
MEDIAN_TOKENS, SIGMA, LONGEST = 220, 1.0, 3000


def law(first: float, ended: float, version: int = 0) -> Law:
    """`first`: acceptance of the first EAGLE draft; `ended`: share of the step's requests that ended."""
    start = SUFFIX_FIRST[0] + (SUFFIX_FIRST[1] - SUFFIX_FIRST[0]) * round(ended, 1)
    return Law(
        tuple(first * FALL**k for k in range(POSITIONS)),
        (start, *(SUFFIX_NEXT,) * (POSITIONS - 1)),
        version,
    )


def long_tailed(count: int, rng: random.Random) -> tuple[int, ...]:
    """Log-normal; the longest is at least ten times the median."""
    lengths = [min(LONGEST, max(8, round(MEDIAN_TOKENS * math.exp(rng.gauss(0.0, SIGMA))))) for _ in range(count - 1)]
    return (*lengths, max(LONGEST, *lengths))


def stationary(rng: random.Random) -> list[Step]:
    """Nothing changes: 16 requests run, those that end are replaced, until the last ones drain."""
    return [Step(tuple(rng.randrange(200, 400) for _ in range(120)), lambda ended: law(GOOD, ended), refill=16)]


def drain(rng: random.Random) -> list[Step]:
    """Steps of 64 long-tailed requests: from 64 running to 1."""
    return [Step(long_tailed(64, rng), lambda ended: law(GOOD, ended)) for _ in range(4)]


def single(rng: random.Random) -> list[Step]:
    """One long request after another: few drafts to learn from, so luck with the first ones weighs most."""
    return [Step((LONGEST,), lambda ended: law(GOOD, ended)) for _ in range(3)]


def drift(rng: random.Random) -> list[Step]:
    """The policy moves away from the drafter step by step; every third step a new drafter is loaded."""
    steps = []
    for n in range(6):
        first = GOOD * (0.9 ** (n % 3) if n else 1.0) * (0.72 if n % 3 == 2 else 1.0)
        steps.append(Step(long_tailed(32, rng), _constant(first, n // 3)))
    return steps


def cold(rng: random.Random) -> list[Step]:
    """An untrained drafter that its training makes good, version by version."""
    return [Step(long_tailed(32, rng), _constant(first, n)) for n, first in enumerate((0.02, 0.02, 0.35, 0.6, GOOD))]


def _constant(first: float, version: int) -> Callable[[float], Law]:
    return lambda ended: law(first, ended, version)


TRACES: dict[str, Callable[[random.Random], Sequence[Step]]] = {
    "stationary": stationary, "drift": drift, "cold": cold, "drain": drain, "single": single,
}  # fmt: skip
