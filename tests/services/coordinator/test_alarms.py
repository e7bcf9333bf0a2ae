"""The alarm about a drafter that is verified and never accepted (pitfalls row 24)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.coordinator.alarms import useless_drafter
from services.coordinator.metrics import StepFacts, step_metrics
from services.core.types import PolicyStepReport, StepMetrics

POLICY = PolicyStepReport(1, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 10, 0.0, (), 0.1)
BLANK = step_metrics(1, 0.0, StepFacts(policy=POLICY), {})


def steps(*lengths: float | None) -> list[StepMetrics]:
    return [replace(BLANK, step=i, acceptance_length=length) for i, length in enumerate(lengths, start=1)]


@pytest.mark.parametrize(
    ("lengths", "alarmed"),
    [
        ((), False),
        ((1.0, 1.0), False),
        ((1.0, 1.0, 1.0), True),
        ((2.1, 1.02, 1.05, 1.0), True),
        ((1.0, 1.0, 1.06), False),
        ((1.0, None, 1.0, 1.0), False),  # a step without speculation breaks the spell
        ((None, None, None), False),  # speculation off is no fault
        ((1.0, 1.0, 1.0, 1.0), False),  # told once, not at every step of the same spell
        ((1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0), True),
    ],
)
def test_three_steps_without_acceptance_raise_the_alarm_once(lengths: tuple[float | None, ...], alarmed: bool) -> None:
    message = useless_drafter(steps(*lengths))
    assert (message is not None) == alarmed
    if message is not None:
        assert "not accepted" in message and "Check" in message
