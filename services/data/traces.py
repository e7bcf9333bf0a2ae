"""Worked traces of chain sums for supervised warm-up: running totals from left to right, then "#<answer>".

The wording varies at random on purpose: a policy that has learnt one fixed wording has no entropy, and neither
reinforcement learning nor the comparison of drafters would have anything to work on.
"""

from __future__ import annotations

import re
from random import Random

from services.core.errors import DataError

CHARACTERS = "\n +-=#;:?,.0123456789abcdefghijklmnopqrstuvwxyz"

_OPENERS = ("", "", "", "sum: ", "so ", "ok, ")
_CONNECTIVES = ("; ", "; ", ", ", ". ", "\n", " so ", " then ", ", now ")
_SUM = re.compile(r"\s*-?\d+(\s*[+-]\s*-?\d+)*\s*=?\s*")

SWAP_CHANCE = 0.15  # "7+12=19" for "12+7=19"
RESTATE_CHANCE = 0.1  # "12+7=19: 19"


def chain_sum_trace(prompt: str, rng: Random) -> str:
    """A trace for a prompt such as "12 + 7 - 35=", e.g. "12+7=19 then 19-35=-16; #-16".

    Raises DataError when `prompt` is not a chain of integers joined by + and -.
    """
    total, steps = _parse(prompt)
    parts = [rng.choice(_OPENERS)]
    for sign, value in steps:
        step, total = _step(total, sign, value, rng)
        parts += [step, rng.choice(_CONNECTIVES)]
    return f"{''.join(parts)}#{total}"


def _step(total: int, sign: str, value: int, rng: Random) -> tuple[str, int]:
    result = total + value if sign == "+" else total - value
    swapped = sign == "+" and rng.random() < SWAP_CHANCE
    text = f"{value}+{total}={result}" if swapped else f"{total}{sign}{value}={result}"
    if rng.random() < RESTATE_CHANCE:
        text += f": {result}"
    return text, result


def _parse(prompt: str) -> tuple[int, list[tuple[str, int]]]:
    """First value, then (sign, value) of each further term; values may be negative ("5 + -3")."""
    if not _SUM.fullmatch(prompt):
        raise DataError(f"{prompt!r} is not a chain sum: worked traces need a prompt such as '12 + 7 - 35='")
    first, *rest = re.findall(r"(?<!\d)-?\d+|[+-]", re.sub(r"[\s=]", "", prompt))
    return int(first), [(rest[i], int(rest[i + 1])) for i in range(0, len(rest), 2)]
