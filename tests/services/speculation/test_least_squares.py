from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.optimize import nnls

from services.speculation.least_squares import nonnegative


@pytest.mark.parametrize("seed", range(20))
def test_as_good_as_an_exact_solver(seed: int) -> None:
    rng = random.Random(seed)
    width, height = rng.randrange(1, 8), rng.randrange(8, 20)
    scale = [10 ** rng.uniform(-6, 3) for _ in range(width)]
    rows = [[rng.gauss(0.5, 1) * s for s in scale] for _ in range(height)]
    wanted = [rng.gauss(0, 1) for _ in range(height)]
    found = nonnegative(rows, wanted)
    _, best = nnls(np.array(rows), np.array(wanted))
    assert all(x >= 0 for x in found)
    assert np.linalg.norm(np.array(rows) @ found - wanted) <= best * (1 + 1e-4) + 1e-9


def test_recovers_what_made_the_numbers() -> None:
    rng = random.Random(1)
    true = (0.0, 2.0, 0.3)
    rows = [[rng.random() for _ in true] for _ in range(30)]
    found = nonnegative(rows, [sum(a * x for a, x in zip(row, true, strict=True)) for row in rows])
    assert found == pytest.approx(true, abs=1e-3)


def test_a_column_of_zeros_gets_nothing() -> None:
    assert nonnegative([[0.0, 1.0], [0.0, 2.0]], [1.0, 2.0]) == pytest.approx([0.0, 1.0], abs=1e-5)
