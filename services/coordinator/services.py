"""Everyone the coordinator talks to, and what a run works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.coordinator.cores import Cores
from services.core.protocols import Blob, DrafterClient, PolicyClient, RewardClient, RolloutClient, Waiter
from services.core.types import Group, Prompt, SamplingParams

Advantages = Callable[[Sequence[Group]], tuple[tuple[float, ...], float]]


@dataclass(frozen=True, slots=True)
class Services:
    """Everyone the coordinator talks to. `drafters` is empty when nothing needs a drafter; else one per slot, with
    `initial_drafter` the training state of drafter version 0. `advantages` gives (one per rollout, zero-variance
    fraction). `cores`: what slots share that have no GPU; None where they share nothing."""

    rollout: Sequence[RolloutClient]
    drafters: Sequence[DrafterClient]
    policy: PolicyClient
    reward: RewardClient
    waiter: Waiter
    initial_drafter: Blob | None
    advantages: Advantages
    cores: Cores | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run works on, prepared and checked before anything starts."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    sampling: SamplingParams
