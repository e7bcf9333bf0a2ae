"""Figures of the summary that are more than a copy."""

from __future__ import annotations

import pytest

from services.coordinator.summary import early, late


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
