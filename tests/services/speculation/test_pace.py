"""A machine that is faster and slower by turns, for seconds at a time, as processors are that others use too: which
strategy pays does not change with it, and the selector must not be led astray.

Seen on H200s, with nothing else of the run's at work: the same rounds took 6 ms for some seconds and 10 ms for others.
"""

from __future__ import annotations

from itertools import product

import pytest

from services.speculation.adaptive import Adaptive
from services.speculation.cost import CostModel
from services.speculation.cost_table import CostTable
from services.speculation.expectation import AcceptanceModel
from services.speculation.round import RoundView
from services.speculation.strategy import DraftStrategy
from tests.services.speculation.rounds import OFF, chain
from tests.services.speculation.test_adaptive import World, points, price
from tests.services.speculation.test_cost import scaled, told

CHAINS = tuple(chain(d) for d in (3, 7, 12))
SLOW, TURN = 1.7, 50  # times as long; rounds at each batch size before the pace changes
SIZES = (32, 12, 5, 2, 1)


def share_of_best(seed: int, rate: float, turns: int = 24) -> float:
    """Of the tokens per second of the strategy that is best at each batch size."""
    slow = {n: SLOW for n in range(turns * len(SIZES) * TURN) if n // (len(SIZES) * TURN) % 2}
    w = World(Adaptive(CHAINS, CostModel(), AcceptanceModel()), rates=(rate,) * 12, seed=seed, held_up=slow)
    took = might = 0.0
    for turn, running in product(range(turns), SIZES):
        seconds = {s.name: 1 / w.score(s, running) for s in (OFF, *CHAINS)}  # for a token, at full pace
        for name, rounds in w.play(running, TURN).items():
            took += (turn > 0) * rounds * seconds[name]
            might += (turn > 0) * rounds * min(seconds.values())
    return might / took


@pytest.mark.parametrize("rate", [0.6, 0.7, 0.8])
def test_the_strategy_that_pays_is_kept_whatever_the_machines_pace(rate: float) -> None:
    """Where each strategy is taken to be as dear as when it was last run: 0.970 to 0.990."""
    shares = [share_of_best(seed, rate) for seed in range(3)]
    assert min(shares) > 0.98, shares


def paced(model: CostModel, strategy: DraftStrategy, view: RoundView, pace: float, rounds: int) -> None:
    for _ in range(rounds):
        told(model, strategy, view, scaled(price(strategy, view), pace))


@pytest.mark.parametrize("calibrated", [True, False])
def test_what_one_strategy_tells_of_the_pace_holds_for_all_that_are_known(calibrated: bool) -> None:
    model = CostModel(CostTable.fit(points()) if calibrated else None)
    view = RoundView(4, 2000, 8)
    for strategy in (OFF, *CHAINS):
        paced(model, strategy, view, 1.0, 40)
    for pace in (SLOW, 1.0, 1 / SLOW, 1.0):
        paced(model, CHAINS[1], view, pace, 40)
        for strategy in (OFF, *CHAINS):
            expected = pace * price(strategy, view).verify
            assert model.seconds(strategy, view).verify == pytest.approx(expected, rel=0.12), strategy.name


def test_a_strategy_that_takes_longer_than_its_table_says_is_no_slower_machine() -> None:
    """The others' rounds, in between, tell."""
    model, view = CostModel(CostTable.fit(points())), RoundView(4, 2000, 8)
    for _ in range(30):
        paced(model, CHAINS[0], view, 1.0, 3)
        paced(model, CHAINS[1], view, 1.5, 1)
    assert model.seconds(CHAINS[0], view).verify == pytest.approx(price(CHAINS[0], view).verify, rel=0.08)
    assert model.seconds(CHAINS[1], view).verify == pytest.approx(1.5 * price(CHAINS[1], view).verify, rel=0.12)
