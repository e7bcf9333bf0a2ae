"""What a person is shown of a run as it goes, as records. Standard library only; part of `services.core.types`, which
names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something worth telling a person: a lost server, a return, a published drafter, a refused load."""

    at_s: float
    kind: str
    subject: str
    message: str


@dataclass(frozen=True, slots=True)
class ControlState:
    """What people asked of a run: to pause between steps, and a strategy's name in place of the selector's choice."""

    paused: bool = False
    forced: str | None = None


@dataclass(frozen=True, slots=True)
class ProgressView:
    """What the live display shows; cheap to produce at any time. `at_s` is when it was made and `phase_at_s` when the
    phase began, in seconds since the start of the run."""

    phase: str
    step: int
    num_steps: int
    rollouts_done: int
    rollouts_total: int
    rollouts_running: int
    tokens_per_s: float
    acceptance_length: float | None
    reward_mean: float | None
    heldout_reward: float | None
    policy_version: int
    drafter_version: int
    slots: Mapping[str, str]
    events: tuple[RunEvent, ...] = ()
    at_s: float = 0.0
    phase_at_s: float = 0.0
    control: ControlState = ControlState()
