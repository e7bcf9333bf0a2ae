"""Sums over rollouts and rewards, pure: acceptance, lengths, means."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from services.core.types import AcceptanceStats, FinishReason, Group


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics; 0.0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def median_interval(values: Sequence[float], rng: random.Random, draws: int = 4000) -> tuple[float, float]:
    """Where the median of such values lies with 95 % confidence: percentiles of the medians of resamples (bootstrap,
    Efron 1979). What differs by less than that was not measured."""
    medians = [median(rng.choices(values, k=len(values))) for _ in range(draws)]
    return quantile(medians, 0.025), quantile(medians, 0.975)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True, slots=True)
class GroupStats:
    """One phase's rollouts in numbers. Rollouts whose verifier failed count in `reward_errors`, not in the means."""

    num_groups: int
    num_rollouts: int
    reward_mean: float
    correct_fraction: float
    reward_errors: int
    lengths: tuple[int, ...]
    truncated_fraction: float
    acceptance: AcceptanceStats


def group_stats(groups: Sequence[Group]) -> GroupStats:
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [r for g in groups for r in g.rewards]
    judged = [r for r in rewards if r.error is None]
    return GroupStats(
        num_groups=len(groups),
        num_rollouts=len(rollouts),
        reward_mean=mean([r.value for r in judged]),
        correct_fraction=mean([float(r.correct) for r in judged]),
        reward_errors=len(rewards) - len(judged),
        lengths=tuple(len(r.response_ids) for r in rollouts),
        truncated_fraction=mean([float(r.finish_reason is FinishReason.LENGTH) for r in rollouts]),
        acceptance=AcceptanceStats.merged(r.acceptance for r in rollouts),
    )
