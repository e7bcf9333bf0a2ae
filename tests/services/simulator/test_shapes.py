from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from deploy.replay import read_costs
from services.config.speculation import eagle_chain
from services.simulator.scenario import Seconds
from services.simulator.shapes import MEASURED, SHAPES, costs_of
from services.speculation.round import RoundView
from services.speculation.strategy import OFF, draft_strategy

POINTS = read_costs("h100-7b").points
CHAIN = draft_strategy(eagle_chain(3))


def test_the_measured_shape_costs_what_was_measured() -> None:
    table = costs_of(MEASURED, POINTS)
    errors = [abs(table.seconds(p.strategy, p.view).total / p.total - 1) for p in POINTS]
    assert max(errors) < 0.15 and median(errors) < 0.03


def test_reading_keys_and_values_costs_what_the_memory_allows_for_everybody() -> None:
    """Without the rule, points at one context length lay all reading on the drafter."""
    table = costs_of(MEASURED, POINTS)

    def more(strategy: object) -> float:
        far, near = (table.seconds(strategy, RoundView(8, 8 * n, 8)).total for n in (8000, 160))  # type: ignore[arg-type]
        return far - near

    bytes_read = 8 * (8000 - 160) * MEASURED.kv_bytes
    assert more(OFF) == pytest.approx(bytes_read / (0.7 * 3.35e12))
    assert more(OFF) < more(CHAIN) < 1.3 * more(OFF)


def test_larger_models_are_slower_on_more_gpus_and_gain_more_from_drafts() -> None:
    view = RoundView(4, 4 * 2000, 8)
    off, ratio = list[float](), list[float]()
    for shape in SHAPES.values():
        table = costs_of(shape, POINTS)
        off.append(table.seconds(OFF, view).total)
        ratio.append(table.seconds(CHAIN, view).total / off[-1])
    assert all(a < b for a, b in pairwise(off)) and all(a > b for a, b in pairwise(ratio))


def test_what_is_measured_of_loading_and_training_is_kept_and_scaled_by_bytes_per_gpu() -> None:
    one, large = SHAPES["7b"].seconds(Seconds()), SHAPES["70b"].seconds(Seconds())
    assert one.publish + one.load == pytest.approx(3.3, rel=0.01)
    assert large.load == pytest.approx(one.load * 70 / 7.6 / 8, rel=0.01)
    assert large.policy_token > 9 * one.policy_token
