"""How a request's rounds are told, depth by depth, in the one list of numbers that SGLang has for its histogram.

numbers[0]: depth of the newest round; behind it, at 1 + d(d+1)/2 + k, rounds of depth d that accepted k <= d drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

Histograms = dict[int, list[int]]


def _place(depth: int, accepted: int) -> int:
    return 1 + depth * (depth + 1) // 2 + accepted


def note_round(numbers: list[int], depth: int, accepted: int) -> None:
    """Count one more round in `numbers`, which begins empty."""
    assert 0 <= accepted <= depth
    place = _place(depth, accepted)
    numbers.extend([0] * (place + 1 - len(numbers)))
    numbers[0] = depth
    numbers[place] += 1


def newest_depth(numbers: Sequence[int]) -> int | None:
    return numbers[0] if numbers else None


def histograms(numbers: Sequence[int]) -> Histograms:
    """By depth, of those that ran: how many rounds accepted 0, 1, ... depth drafts."""
    found: Histograms = {}
    depth = 0
    while _place(depth, 0) < len(numbers):
        row = list(numbers[_place(depth, 0) : _place(depth, depth) + 1])
        if any(row):
            found[depth] = row + [0] * (depth + 1 - len(row))
        depth += 1
    return found
