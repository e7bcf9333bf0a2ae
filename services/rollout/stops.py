"""How many of the tokens just committed to emit, and whether the response ends there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.core.types import FinishReason, SamplingParams


@dataclass(frozen=True)
class Emission:
    """The first `count` new tokens are emitted; `finish_reason` is None while the response goes on."""

    count: int
    finish_reason: FinishReason | None


def emit(
    earlier: Sequence[int], new: Sequence[int], sampling: SamplingParams, decode: Callable[[Sequence[int]], str]
) -> Emission:
    """Walk the new tokens in order: the first one that stops the response wins, however many were accepted at once.

    A stop id or a completed stop string counts up to the budget; at the budget without a stop the reason is LENGTH.
    Stop strings are looked for in the text of all ids, so matches that span tokens or steps are found; the token that
    completes a match is the last one emitted.
    """
    room = sampling.max_tokens - len(earlier)
    assert room > 0 and new, "a finished response was stepped again"
    window = list(new[:room])

    def matched(count: int) -> bool:
        return find_stop(decode([*earlier, *window[:count]]), sampling.stop_strings) is not None

    look = bool(sampling.stop_strings) and matched(len(window))  # most rounds need one decode, not one per token
    for count, token in enumerate(window, start=1):
        if (look and matched(count)) or token in sampling.stop_token_ids:
            return Emission(count, FinishReason.STOP)
    return Emission(len(window), FinishReason.LENGTH if len(window) == room else None)


def find_stop(text: str, stop_strings: Sequence[str]) -> int | None:
    """Where the earliest stop string begins in `text`."""
    starts = [start for s in stop_strings if (start := text.find(s)) >= 0]
    return min(starts) if starts else None


def response_text(ids: Sequence[int], sampling: SamplingParams, decode: Callable[[Sequence[int]], str]) -> str:
    """Text of all ids at once (characters split over tokens come out whole), cut before a stop string."""
    text = decode(ids)
    start = find_stop(text, sampling.stop_strings)
    return text if start is None else text[:start]
