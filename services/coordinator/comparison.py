"""Speculation off against on, measured in the run itself: same prompts, same seeds, same servers, interleaved.

Each repeat takes prompts of its own, and generates them with speculation first: a drafter that remembers responses
(the suffix index) must not have seen the very ones it is measured on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.coordinator.summary import Comparison
from services.core.types import AcceptanceStats, Prompt, Rollout, SamplingParams

OFF = "off"

# (label, prompts, group size, sampling, forced strategy or None) -> rollouts in group order, wall seconds.
Generate = Callable[[str, Sequence[Prompt], int, SamplingParams, str | None], tuple[list[Rollout], float]]


def compare(
    generate: Generate,
    prompts: Sequence[Prompt],
    num_prompts: int,
    repeats: int,
    group_size: int,
    sampling: SamplingParams,
    strategies: Sequence[str],
) -> Comparison:
    """`strategies` are the names that greedy decoding is checked with, each against plain decoding."""
    off_s: list[float] = []
    on_s: list[float] = []
    accepted: list[AcceptanceStats] = []
    for repeat in range(-1, repeats):
        chosen = _slice(prompts, repeat + 1, num_prompts)
        label = f"compare{repeat + 1}"
        on, on_seconds = generate(label, chosen, group_size, sampling, None)
        _, off_seconds = generate(label, chosen, group_size, sampling, OFF)
        if repeat >= 0:  # the first round only warms up
            on_s.append(on_seconds)
            off_s.append(off_seconds)
            accepted += [r.acceptance for r in on]
    chosen = _slice(prompts, repeats + 1, num_prompts)
    return Comparison(
        rollout_seconds_off=statistics.median(off_s),
        rollout_seconds_on=statistics.median(on_s),
        greedy_mismatches=greedy_mismatches(generate, chosen, sampling, strategies),
        acceptance_length_on=AcceptanceStats.merged(accepted).acceptance_length,
        repeats=repeats,
        greedy_checked=len(chosen) * len(strategies),
    )


def greedy_mismatches(
    generate: Generate, prompts: Sequence[Prompt], sampling: SamplingParams, strategies: Sequence[str]
) -> int:
    """How many greedy responses differ from plain decoding, over all strategies. Lossless speculation gives 0."""
    greedy = replace(sampling, temperature=0.0)
    plain, _ = generate("greedy", prompts, 1, greedy, OFF)
    count = 0
    for name in strategies:
        drafted, _ = generate("greedy", prompts, 1, greedy, name)
        count += sum(a.response_ids != b.response_ids for a, b in zip(plain, drafted, strict=True))
    return count


def _slice(prompts: Sequence[Prompt], number: int, size: int) -> list[Prompt]:
    return [prompts[(number * size + i) % len(prompts)] for i in range(size)]
