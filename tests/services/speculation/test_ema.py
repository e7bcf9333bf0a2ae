from __future__ import annotations

from collections.abc import Iterable

import pytest

from services.config.speculation import DepthSlot, EmaSelector
from services.speculation.ema import Ema
from services.speculation.round import RoundOutcome, RoundView, StageSeconds
from services.speculation.strategy import OFF

SECONDS = StageSeconds(0.0, 0.0, 0.01, 0.0)


def play(selector: Ema, accepted: float, rounds: int, running: int = 4) -> list[int]:
    """Depths chosen when that many drafts are accepted per request, if so many were proposed."""
    depths = []
    for _ in range(rounds):
        view = RoundView(running, 100)
        strategy = selector.choose(view).strategy
        depths.append(strategy.depth)
        count = round(min(accepted, strategy.depth) * running)
        found = (count,) if strategy.depth else ()
        selector.record(RoundOutcome(strategy, view, running + count, SECONDS, found, found))
    return depths


def one_slot(*depths: int, **more: float) -> Ema:
    return Ema(EmaSelector(slots=(DepthSlot(depths=depths, **more),)))  # type: ignore[arg-type]


def test_goes_deeper_while_everything_is_accepted_and_back_when_nothing_is() -> None:
    selector = one_slot(1, 3, 7)
    depths = play(selector, 99, 60)
    assert depths[0] == 3 and depths[-1] == 7
    assert play(selector, 0, 60)[-1] == 1


def test_nothing_moves_before_the_warm_up_and_between_updates() -> None:
    depths = play(one_slot(1, 3, 7), 0, 40)
    assert depths[:15] == [3] * 15, "10 rounds of warm-up, then the fifth round decides"
    changes = [n for n in range(1, 40) if depths[n] != depths[n - 1]]
    assert changes and all((n - 10) % 5 == 0 for n in changes)


@pytest.mark.parametrize(("hysteresis", "stays"), [(0.0, False), (-0.25, True)])
def test_down_hysteresis_is_added_to_the_threshold(hysteresis: float, stays: bool) -> None:
    """From 3 down to 1 at a mean of at most 0.5 + hysteresis; the mean tends to 0.49."""
    selector = one_slot(1, 3, down_hysteresis=hysteresis)
    assert (play(selector, 0.49, 300, running=100)[-1] == 3) is stays


def test_depth_0_is_off_and_is_left_by_a_probe_at_the_next_update() -> None:
    selector = one_slot(0, 1)
    depths = play(selector, 0, 200)
    assert set(depths) == {0, 1}, "it flaps: nothing is accepted at depth 0 to judge by"
    runs = {len(r) for r in "".join(map(str, depths[20:-20])).split("1") if r}
    assert runs == {5}
    assert selector.choose(RoundView(4, 9)).strategy in (OFF, *selector._chains.values())


def test_each_range_has_its_own_mean() -> None:
    selector = Ema(EmaSelector())
    play(selector, 99, 60, running=1)
    assert play(selector, 0, 1, running=7) == [7] and play(selector, 0, 1, running=64) == [0]
    assert set(play(selector, 0, 60, running=64)) == {0}


def test_a_forced_round_does_not_count() -> None:
    selector, view = one_slot(1, 3, 7), RoundView(1, 9)
    before = vars(selector._slots[0]).copy()
    selector.record(RoundOutcome(OFF, view, 1, SECONDS))
    assert vars(selector._slots[0]) == before


def depths_of(config: EmaSelector) -> Iterable[int]:
    return (s.depth for s in config.strategies)


def test_its_strategies_are_those_of_all_ranges() -> None:
    assert list(depths_of(EmaSelector())) == [0, 1, 3, 7]
    assert all(not s.sampled for s in EmaSelector(sampled_drafts=False).strategies if s.depth)
