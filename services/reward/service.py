"""Rewards for rollouts: the configured verifier behind a pool that survives whatever a response makes it do."""

from __future__ import annotations

from collections.abc import Sequence

from services.config.schema import ClusterConfig, ReasoningGymData
from services.core.types import Prompt, Reward, Rollout
from services.reward.pool import RewardPool
from services.reward.worker import VerifierSpec


class RewardService:
    """`errors` counts rollouts whose verifier failed so far (`Reward.error`); those are not wrong answers."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self.errors = 0

    def score(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Reward]:
        """One reward per rollout, in order; `prompts[i]` is the prompt of `rollouts[i]`."""
        assert len(prompts) == len(rollouts)
        assert all(p.id == r.prompt_id for p, r in zip(prompts, rollouts, strict=True)), "a rollout of another prompt"
        rewards = self._pool.score(list(zip(prompts, rollouts, strict=True)))
        self.errors += sum(reward.error is not None for reward in rewards)
        return rewards

    def close(self) -> None:
        self._pool.close()


def build_reward_service(config: ClusterConfig) -> RewardService:
    """Starts `config.reward.workers` processes; `close` ends them."""
    reward, source = config.reward, config.data.source
    params = {source.task: source.params} if isinstance(source, ReasoningGymData) else {}
    spec = VerifierSpec(reward.verifier, reward.answer_marker, params)
    return RewardService(RewardPool(spec, reward.workers, reward.timeout_s))
