from __future__ import annotations

import random
from statistics import median

import pytest

from services.coordinator.stats import median_interval


@pytest.mark.parametrize("count", [5, 9, 30])
def test_the_interval_holds_the_true_median_about_as_often_as_it_says(count: int) -> None:
    rng = random.Random(count)
    held = 0
    for _ in range(200):
        low, high = median_interval([rng.gauss(1.0, 0.1) for _ in range(count)], rng, 300)
        held += low <= 1.0 <= high
    assert 0.88 <= held / 200 <= 1.0


def test_more_values_narrow_it_and_equal_ones_leave_no_doubt() -> None:
    rng = random.Random(0)
    values = [rng.gauss(1.0, 0.1) for _ in range(200)]
    few, many = (median_interval(v, random.Random(1)) for v in (values[:10], values))
    assert many[1] - many[0] < 0.5 * (few[1] - few[0]) and many[0] < median(values) < many[1]
    assert median_interval([1.02] * 5, rng) == (1.02, 1.02)
