"""The run in one dictionary, kept up to date as the run goes so that a stopped or failed run has a valid one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.coordinator.stats import mean
from services.core.types import EvalResult, StepMetrics


@dataclass(frozen=True, slots=True)
class Comparison:
    """Median wall seconds of the same prompts and seeds without and with speculation, and greedy differences."""

    rollout_seconds_off: float
    rollout_seconds_on: float
    greedy_mismatches: int
    acceptance_length_on: float | None
    repeats: int
    greedy_checked: int


@dataclass(slots=True)
class Summary:
    steps: list[StepMetrics] = field(default_factory=list)
    evaluations: list[EvalResult] = field(default_factory=list)
    comparison: Comparison | None = None
    events: int = 0
    policy_version: int = 0
    drafter_version: int = 0
    energy_method: str | None = None

    def as_dict(self, status: str, wall_s: float, error: str | None = None) -> dict[str, Any]:
        """`status` is finished, stopped or failed. Numbers that were not measured are None."""
        measured = [m.acceptance_length for m in self.steps]
        live = [m.acceptance_length_live_offline for m in self.steps]
        frozen = [m.acceptance_length_frozen_offline for m in self.steps]
        evaluated = [e.reward_mean for e in self.evaluations]
        compared = self.comparison
        return {
            "status": status,
            "error": error,
            "steps": len(self.steps),
            "groups": sum(m.num_groups for m in self.steps),
            "rollouts": sum(m.num_rollouts for m in self.steps),
            "heldout_reward_before": evaluated[0] if evaluated else None,
            "heldout_reward_after": evaluated[-1] if len(evaluated) > 1 else None,
            "acceptance_length_first": early(measured),
            "acceptance_length_last": late(measured),
            "acceptance_length_frozen_last": late(frozen),
            "acceptance_length_live_last_offline": late(live),
            "idle_seconds": sum(m.idle_s for m in self.steps),
            "drafting_seconds": sum(m.drafting_s for m in self.steps),
            "rollout_seconds_off": compared.rollout_seconds_off if compared else None,
            "rollout_seconds_on": compared.rollout_seconds_on if compared else None,
            "greedy_mismatches": compared.greedy_mismatches if compared else None,
            "greedy_checked": compared.greedy_checked if compared else None,
            "compare_repeats": compared.repeats if compared else None,
            "compare_acceptance_length": compared.acceptance_length_on if compared else None,
            "policy_version": self.policy_version,
            "drafter_version": self.drafter_version,
            "events": self.events,
            "wall_seconds": wall_s,
            **energy_totals(self.steps, self.energy_method),
        }


def early(values: Sequence[float | None]) -> float | None:
    """Mean over the first fifth of the steps that have a value: one step's tail is too few responses to go by."""
    known = [v for v in values if v is not None]
    return mean(known[: -(-len(known) // 5)]) if known else None


def late(values: Sequence[float | None]) -> float | None:
    """Mean over the last fifth of the steps that have a value."""
    return early(values[::-1])


def energy_totals(steps: Sequence[StepMetrics], method: str | None) -> dict[str, Any]:
    """Joules by role over the steps that were measured, how many these are, and joules of one step; evaluations and the
    comparison are not in it."""
    measured = [m.energy_j for m in steps if m.energy_j is not None]
    roles = dict.fromkeys(role for energy in measured for role in energy)
    by_role = {role: sum(energy.get(role, 0.0) for energy in measured) for role in roles}
    return {
        "energy_j": by_role if measured else None,
        "energy_steps": len(measured),
        "joules_per_step": sum(by_role.values()) / len(measured) if measured else None,
        "energy_method": method,
    }
