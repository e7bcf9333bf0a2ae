"""Makers of prompts and rollouts for the reward tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.core.types import AcceptanceStats, FinishReason, Prompt, Rollout, SamplingParams

MakePair = Callable[..., tuple[Prompt, Rollout]]


@pytest.fixture(scope="session")
def pair() -> MakePair:
    """A prompt with its answer and a rollout with a text."""

    def make(
        answer: str,
        text: str,
        finish: FinishReason = FinishReason.STOP,
        task: str = "chain_sum",
        meta: dict[str, Any] | None = None,
        last_id: int = 2,
    ) -> tuple[Prompt, Rollout]:
        prompt = Prompt("id", "a question", (1, 5), answer, task, meta or {})
        ids = (7, last_id)
        return prompt, Rollout(
            "g", "id", 0, 0, (1, 5), ids, (-0.5,) * len(ids), text, finish, SamplingParams(stop_token_ids=(2, 3)),
            (0,), (0,), AcceptanceStats(),
        )  # fmt: skip

    return make
