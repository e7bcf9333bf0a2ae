"""A reward function of a user's that waits: a run is held within a step for as long as a test needs it there."""

from __future__ import annotations

import os
from pathlib import Path

from services.core.types import Prompt, Rollout
from tests.e2e.two_nodes import wait_until

CLOSED = "LONGTAIL_TEST_GATE_CLOSED"  # names a file; while it exists nothing is scored
HELD_S = 400.0


def score(prompt: Prompt, rollout: Rollout) -> bool:
    """Whether the answer is in the response, said once the gate is open. Raises TimeoutError after `HELD_S`."""
    closed = Path(os.environ[CLOSED])
    wait_until(f"removing {closed}", lambda: not closed.exists(), HELD_S)
    return prompt.answer in rollout.text
