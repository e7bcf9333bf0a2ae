"""What a person must hear although nothing failed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.core.types import StepMetrics

# A drafter whose weights were lost (a restart, a release of memory) goes on being verified and never accepted: output
# stays right, every verify step commits its one bonus token (row 24).
USELESS_ACCEPTANCE_LENGTH, USELESS_STEPS = 1.05, 3


def useless_drafter(steps: Sequence[StepMetrics]) -> str | None:
    """A message when speculation brought nothing in each of the last `USELESS_STEPS` steps, and only at the step that
    completes them: one message per spell."""
    spell = 0
    for step in reversed(steps):
        if step.acceptance_length is None or step.acceptance_length > USELESS_ACCEPTANCE_LENGTH:
            break
        spell += 1
    if spell != USELESS_STEPS:
        return None
    return (
        f"acceptance length {steps[-1].acceptance_length:.2f} for {spell} steps: drafts are verified and not accepted. "
        "Check that the servers serve the published drafter version and that it belongs to this target, or switch "
        "speculation off"
    )
