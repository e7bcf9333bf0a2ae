"""Who chooses SGLang's next round, and which seconds, tokens and tries are told of a round that ran ahead."""

from __future__ import annotations

from itertools import product

import pytest

from services.rollout.choices import FORCED
from services.rollout.sglang.deciding import Decider, LaunchedRound
from services.rollout.sglang.graphs import CapturedGraphs, GraphPool
from services.speculation.round import Choice, RoundOutcome, RoundView
from services.speculation.strategy import OFF, DraftStrategy
from tests.services.rollout.engines import strategy

SEVERAL = {0: OFF, 3: strategy("eagle", 3), 5: strategy("eagle", 5)}
POOL = GraphPool((0, 3, 5), 64, 96, 96, 1.0, 2**30)  # depth 3 up to 24 requests, depth 5 up to 16


class Wants:
    """A selector that always wants the same."""

    def __init__(self, wanted: DraftStrategy) -> None:
        self.wanted, self.told, self.views = wanted, list[RoundOutcome](), list[RoundView]()

    def choose(self, view: RoundView) -> Choice:
        self.views.append(view)
        return Choice(self.wanted, "wanted", 20.0, 10.0)

    def record(self, outcome: RoundOutcome) -> None:
        self.told.append(outcome)


def decider(depth: int = 5, captured: tuple[int, ...] = (0, 3, 5), fresh: bool = False) -> tuple[Decider, Wants]:
    """Every depth has run, unless `fresh`."""
    wants = Wants(SEVERAL[depth])
    graphs = {d: CapturedGraphs(d, POOL.largest(d), 1, 0, 0, 0.0) for d in captured}
    made = Decider(wants, SEVERAL, POOL, graphs)
    for d, running in () if fresh else product(captured, range(1, 65)):
        made.force(d)
        made.finish(made.launch(RoundView(running, 9), -1.0), [0], 1, -0.5)
    made.force(None)
    made.take_spans()
    return made, wants


def depth_of(launched: LaunchedRound) -> int:
    return launched.choice.strategy.depth


@pytest.mark.parametrize(
    ("running", "wanted", "found"), [(16, 5, 5), (17, 5, 3), (24, 5, 3), (25, 5, 0), (25, 3, 0), (64, 0, 0)]
)
def test_beyond_its_graphs_a_strategy_is_not_to_be_had(running: int, wanted: int, found: int) -> None:
    launched = decider(wanted)[0].launch(RoundView(running, 100), 0.0)
    assert depth_of(launched) == found
    assert (launched.choice.reason == "wanted") == (wanted == found)
    assert ("no graphs of" in launched.choice.reason) == (wanted != found)


def test_the_selector_is_told_what_it_can_have() -> None:
    ours, wants = decider(3)
    for running, depths in ((16, (0, 3, 5)), (20, (0, 3)), (40, (0,))):
        ours.launch(RoundView(running, 100), 0.0)
        assert wants.views[-1].offered == tuple(SEVERAL[d] for d in depths)


def test_a_depth_that_memory_left_out_is_not_to_be_had() -> None:
    assert depth_of(decider(3, captured=(0, 5))[0].launch(RoundView(2, 9), 0.0)) == 0


def test_a_forced_depth_asks_nobody_and_the_selector_still_learns() -> None:
    ours, wants = decider()
    ours.force(3)
    launched = ours.launch(RoundView(60, 100), 1.0)
    assert depth_of(launched) == 3 and launched.choice.reason == FORCED and not wants.views
    ours.finish(launched, [3, 0], 5, 1.5)
    assert wants.told[0].strategy == SEVERAL[3]
    ours.force(None)
    assert depth_of(ours.launch(RoundView(2, 9), 2.0)) == 5
    with pytest.raises(AssertionError):
        ours.force(4)


def test_the_first_round_of_a_graph_is_kept_from_the_selector() -> None:
    """Told, half a second for a round that takes milliseconds, the strategy would not be chosen again for long. One
    that takes no longer than usual is told, and so is a slow one that ran before: the machine may be slower now."""
    ours, wants = decider(fresh=True)
    rounds = (
        (5, 2, 0.55, 0), (5, 2, 0.008, 1), (3, 2, 0.5, 1), (0, 2, 0.4, 1), (3, 2, 0.006, 2), (5, 3, 0.1, 2),
        (5, 2, 0.008, 3), (5, 3, 0.008, 4), (3, 4, 0.012, 5), (5, 2, 0.09, 6), (5, 5, 0.2, 7), (5, 6, 0.9, 7),
    )  # fmt: skip
    for depth, running, took, learned in rounds:
        ours.force(depth)
        ours.finish(ours.launch(RoundView(running, 9), 1.0), [1] * running, 2 * running, 1.0 + took)
        assert len(wants.told) == learned
        ours.read(0.0)
    assert [round(told.seconds.total, 3) for told in wants.told] == [0.008, 0.006, 0.008, 0.008, 0.012, 0.09, 0.2]
    assert sum(span.rounds for span in ours.take_spans()) == len(rounds), "what ran is told all the same"


def test_tries_and_accepted_drafts_by_position() -> None:
    ours, wants = decider(3)
    ours.finish(ours.launch(RoundView(6, 50), 1.0), [0, 1, 3, 3, 2], 12, 1.25)
    (told,) = wants.told
    assert told.tried == (5, 4, 3) and told.accepted == (4, 3, 2) and told.tokens == 12
    assert told.cut == 5 + 9 - 12, "what stops cut off; the request that died beside is none of it"
    assert told.seconds.total == pytest.approx(0.25) and told.view.running == 6
    ours, wants = decider(0)
    ours.finish(ours.launch(RoundView(2, 9), 1.0), [0, 0], 2, 1.1)
    assert wants.told[0].tried == () and wants.told[0].strategy == OFF


def test_rounds_launched_ahead_take_the_time_between_their_readings() -> None:
    """The next round is launched before the last one is read; its own time begins where that one's ended."""
    ours, wants = decider(3)
    view = RoundView(1, 9)
    first = ours.launch(view, 0.0)
    second = ours.launch(view, 0.010)
    ours.finish(first, [1], 2, 0.100)
    third = ours.launch(view, 0.101)
    ours.finish(second, [1], 2, 0.220)
    ours.finish(third, [1], 2, 0.300)
    assert [o.seconds.total for o in wants.told] == pytest.approx([0.100, 0.120, 0.080])


def test_a_prefill_before_a_round_and_an_idle_time_are_not_its_own() -> None:
    ours, wants = decider(3)
    first = ours.launch(RoundView(1, 9), 0.0)
    ours.read(0.9)  # of a prefill that was launched before
    ours.finish(first, [1], 2, 1.0)
    late = ours.launch(RoundView(1, 9), 7.0)  # nothing ran for six seconds
    ours.finish(late, [1], 2, 7.1)
    assert [o.seconds.total for o in wants.told] == pytest.approx([0.1, 0.1])


def test_a_round_that_a_pause_held_says_nothing() -> None:
    ours, wants = decider(3)
    held = ours.launch(RoundView(1, 9), 1.0)
    ours.hold(1.01)
    ours.finish(held, [1], 2, 5.0)
    free = ours.launch(RoundView(1, 9), 5.1)
    ours.finish(free, [2], 3, 5.2)
    assert [o.tokens for o in wants.told] == [3] and wants.told[0].seconds.total == pytest.approx(0.1)


def test_a_round_of_which_every_request_had_ended_says_nothing() -> None:
    ours, wants = decider(3)
    ours.finish(ours.launch(RoundView(2, 9), 1.0), [], 0, 1.2)
    assert not wants.told and ours.take_spans() == ()


def test_choices_are_told_with_what_was_expected() -> None:
    ours, _ = decider(3)
    for n in range(3):
        ours.finish(ours.launch(RoundView(4, 40), float(n)), [1] * 4, 8, n + 0.5)
    (span,) = ours.take_spans()
    assert (span.strategy, span.reason, span.rounds, span.tokens) == ("eagle_3_1_4", "wanted", 3, 24)
    assert span.expected == pytest.approx(20.0) and span.expected_off == pytest.approx(10.0)
    assert (span.start_s, span.end_s) == (0.0, 2.5) and ours.take_spans() == ()
