"""Rewards for rollouts: the configured verifier behind a pool that survives whatever a response makes it do."""

from __future__ import annotations

from collections.abc import Sequence

from services.config.schema import ClusterConfig, ReasoningGymData
from services.core.types import Prompt, Reward, Rollout
from services.reward.custom import load_function
from services.reward.pool import RewardPool
from services.reward.sandbox import check_sandbox
from services.reward.worker import Pair, VerifierSpec


class RewardService:
    """`errors` counts rollouts whose verifier failed so far (`Reward.error`); those are not wrong answers."""

    def __init__(self, pool: RewardPool, retries: int = 0) -> None:
        self._pool, self._retries = pool, retries
        self.errors = 0

    def score(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Reward]:
        """One reward per rollout, in order; `prompts[i]` is the prompt of `rollouts[i]`."""
        assert len(prompts) == len(rollouts)
        assert all(p.id == r.prompt_id for p, r in zip(prompts, rollouts, strict=True)), "a rollout of another prompt"
        pairs = list(zip(prompts, rollouts, strict=True))
        rewards = self._pool.score(pairs)
        for _ in range(self._retries):
            rewards = self._retried(pairs, rewards)
        self.errors += sum(reward.error is not None for reward in rewards)
        return rewards

    def _retried(self, pairs: Sequence[Pair], rewards: Sequence[Reward]) -> list[Reward]:
        failed = [i for i, reward in enumerate(rewards) if reward.error is not None]
        again = dict(zip(failed, self._pool.score([pairs[i] for i in failed]) if failed else (), strict=True))
        return [again.get(i, reward) for i, reward in enumerate(rewards)]

    def close(self) -> None:
        self._pool.close()


def build_reward_service(config: ClusterConfig) -> RewardService:
    """Starts `config.reward.workers` processes; `close` ends them. Raises ConfigError for a verifier that cannot work
    on this machine: in a worker it would be lost with the process."""
    reward, source = config.reward, config.data.source
    if reward.function is not None:
        load_function(reward.function)
    if reward.verifier == "code":
        check_sandbox(reward.sandbox)
    params = {source.task: source.params} if isinstance(source, ReasoningGymData) else {}
    return RewardService(RewardPool(VerifierSpec(reward, params), reward.workers, reward.timeout_s), reward.retries)
