"""From what a step did to its line of metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.coordinator.dynamic_sampling import StepGroups
from services.coordinator.stats import group_stats, mean, quantile
from services.core.types import (
    AcceptanceEstimate,
    DrafterProgress,
    Group,
    PolicyStepReport,
    SlotState,
    StepMetrics,
)


@dataclass(slots=True)
class StepFacts:
    """Filled while a step runs. `seconds` by phase: rollout, reward, policy, publish. `groups`: all that were sampled,
    of which `dropped_groups` were not trained on."""

    seconds: dict[str, float] = field(default_factory=dict)
    slot_seconds: dict[SlotState, float] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    dropped_groups: int = 0
    sampling_rounds: int = 1
    warnings: tuple[str, ...] = ()
    zero_variance_fraction: float = 0.0
    policy: PolicyStepReport | None = None
    drafter: Sequence[DrafterProgress] = ()
    drafter_version: int = 0
    energy_j: Mapping[str, float] | None = None
    predicted_gain: float | None = None
    achieved_gain: float | None = None

    def add_slot_seconds(self, seconds: Mapping[SlotState, float]) -> None:
        """Of one more window of the step."""
        for state, spent in seconds.items():
            self.slot_seconds[state] = self.slot_seconds.get(state, 0.0) + spent

    def sampled(self, groups: StepGroups) -> None:
        self.groups, self.sampling_rounds = groups.sampled, groups.rounds
        self.dropped_groups = len(groups.sampled) - len(groups.chosen())
        warning = groups.warning()
        self.warnings = () if warning is None else (warning,)


def step_metrics(step: int, at_s: float, facts: StepFacts, estimates: Mapping[str, AcceptanceEstimate]) -> StepMetrics:
    assert facts.policy is not None, "a step is recorded after its train_step"
    stats, policy = group_stats(facts.groups), facts.policy
    offline = {name: e.acceptance_length for name, e in estimates.items()}
    micro_steps = sum(p.micro_steps for p in facts.drafter)
    return StepMetrics(
        step=step,
        at_s=at_s,
        reward_mean=stats.reward_mean,
        correct_fraction=stats.correct_fraction,
        num_rollouts=stats.num_rollouts,
        num_groups=stats.num_groups,
        response_tokens=sum(stats.lengths),
        response_len_p50=quantile(stats.lengths, 0.50),
        response_len_p99=quantile(stats.lengths, 0.99),
        response_len_max=max(stats.lengths, default=0),
        truncated_fraction=stats.truncated_fraction,
        zero_variance_fraction=facts.zero_variance_fraction,
        reward_errors=stats.reward_errors,
        acceptance_length=stats.acceptance.acceptance_length,
        acceptance_rate=stats.acceptance.acceptance_rate,
        acceptance_length_live_offline=offline.get("live"),
        acceptance_length_frozen_offline=offline.get("frozen"),
        steps_by_strategy=dict(stats.acceptance.steps_by_strategy),
        policy_version=policy.policy_version,
        drafter_version=facts.drafter_version,
        policy_loss=policy.loss,
        grad_norm=policy.grad_norm,
        kl=policy.kl,
        entropy=policy.entropy,
        surprise=policy.surprise,
        surprise_errors=policy.surprise_errors,
        logprob_gap=policy.logprob_gap,
        mismatch_kl=policy.mismatch_kl,
        corrected_fraction=policy.corrected_fraction,
        drafter_loss=mean([p.loss for p in facts.drafter]) if facts.drafter else None,
        drafter_micro_steps=micro_steps,
        rollout_s=facts.seconds.get("rollout", 0.0),
        reward_s=facts.seconds.get("reward", 0.0),
        policy_s=facts.seconds.get("policy", 0.0),
        publish_s=facts.seconds.get("publish", 0.0),
        idle_s=facts.slot_seconds.get(SlotState.IDLE, 0.0),
        drafting_s=facts.slot_seconds.get(SlotState.DRAFTING, 0.0),
        warnings=(*facts.warnings, *policy.warnings),
        energy_j=facts.energy_j,
        predicted_gain=facts.predicted_gain,
        achieved_gain=facts.achieved_gain,
        dropped_groups=facts.dropped_groups,
        sampling_rounds=facts.sampling_rounds,
    )
