"""Figures of the summary that are more than a copy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.coordinator.summary import Summary, early, energy_totals, late
from tests.services.coordinator.world import World


@pytest.mark.parametrize(
    ("values", "first", "last"),
    [
        ([], None, None),
        ([None, None], None, None),
        ([2.0], 2.0, 2.0),
        ([None, 1.0, 2.0, 3.0, 4.0, 5.0], 1.0, 5.0),
        ([1.0, 3.0, 9.0, 9.0, 9.0, None, 5.0, 7.0], 2.0, 6.0),
    ],
)
def test_first_and_last_are_means_of_a_fifth(values: list[float | None], first: float, last: float) -> None:
    assert (early(values), late(values)) == (first, last)


def test_energy_is_that_of_the_steps_that_were_measured() -> None:
    world = World()
    world.coordinator.run()
    first, second, third = world.observer.steps
    steps = [
        replace(first, energy_j={"rollout": 100.0, "idle": 20.0}),
        replace(second, energy_j=None),
        replace(third, energy_j={"rollout": 50.0, "idle": 10.0}),
    ]
    assert energy_totals(steps, "power") == {
        "energy_j": {"rollout": 150.0, "idle": 30.0},
        "energy_steps": 2,
        "joules_per_step": 90.0,
        "energy_method": "power",
    }
    told = Summary(steps=steps, energy_method="power").as_dict("finished", 1.0)
    assert told["joules_per_step"] == 90.0
