"""What a model server has done so far, in numbers that others may read."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.serving import LearningView, ServerView
from services.core.types import Rollout, ServedVersions


@dataclass
class Tally:
    """Written by the engine's thread alone."""

    swaps: int = 0
    refused: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    verify_steps: int = 0

    def count(self, rollout: Rollout) -> None:
        stats = rollout.acceptance
        self.generated += len(rollout.response_ids)
        self.drafted += stats.proposed
        self.accepted += stats.num_accepted_tokens
        self.verify_steps += stats.verify_steps

    def view(
        self, server: str, running: int, waiting: int, versions: ServedVersions, learning: LearningView | None
    ) -> ServerView:
        return ServerView(
            server=server,
            running=running,
            waiting=waiting,
            versions=versions,
            swaps=self.swaps,
            refused=self.refused,
            generated_tokens=self.generated,
            draft_tokens=self.drafted,
            accepted_tokens=self.accepted,
            verify_steps=self.verify_steps,
            learning=learning,
        )
