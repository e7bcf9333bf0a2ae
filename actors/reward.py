"""The reward workers' front as an actor: builds the service and delegates."""

from __future__ import annotations

import os
from collections.abc import Sequence

from services.config.schema import ClusterConfig
from services.core.types import Prompt, Reward, Rollout
from services.reward.service import build_reward_service


class RewardActor:
    def __init__(self, config: ClusterConfig) -> None:
        self._service = build_reward_service(config)

    def process_id(self) -> int:
        return os.getpid()

    def score(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Reward]:
        return self._service.score(prompts, rollouts)

    def close(self) -> None:
        """End the worker processes."""
        self._service.close()
