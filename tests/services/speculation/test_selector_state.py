"""What a selector has learned goes on in another process: from then on it chooses as the one that was left alone."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.config.speculation import (
    Bucket,
    BucketSelector,
    DepthSlot,
    EmaSelector,
    StrategyConfig,
    eagle_chain,
)
from services.core.selector import SelectorState
from services.speculation.adaptive import Adaptive
from services.speculation.beg import BucketedEpsilonGreedy
from services.speculation.cost import CostModel
from services.speculation.cost_table import CostPoint, CostTable
from services.speculation.ema import Ema
from services.speculation.expectation import AcceptanceModel
from services.speculation.round import Choice, RoundView, StageSeconds
from services.speculation.selector import Fixed, Learns, Selector, restore_selector, selector_state
from tests.services.speculation.rounds import OFF, SUFFIX, TREE, chain, outcome

ARMS = (OFF, chain(2), chain(5), TREE, SUFFIX)
LISTED = (
    StrategyConfig(),
    eagle_chain(2),
    eagle_chain(5),
    StrategyConfig(drafter="suffix", depth=4, num_draft_tokens=5),
)


def adaptive(seed: int = 0) -> Adaptive:
    return Adaptive(ARMS, CostModel(), AcceptanceModel())


@cache
def table() -> CostTable:
    views = [RoundView(n, n * c) for n in (1, 8, 32) for c in (20, 500)]
    return CostTable.fit([CostPoint(s, v, 0.01 + 1e-4 * v.running * s.num_draft_tokens) for s in ARMS for v in views])


def measured(seed: int = 0) -> Adaptive:
    selector = Adaptive(ARMS, CostModel(table()), AcceptanceModel())
    selector.measured = True
    return selector


def bucketed(seed: int = 0) -> BucketedEpsilonGreedy:
    buckets = (Bucket(min_running=1, strategies=LISTED), Bucket(min_running=8, strategies=LISTED[:3]))
    return BucketedEpsilonGreedy(BucketSelector(epsilon=0.2, window=20, buckets=buckets), random.Random(seed))


def ema(seed: int = 0) -> Ema:
    slots = (DepthSlot(min_running=1, depths=(0, 1, 3, 7)), DepthSlot(min_running=8, depths=(0, 2)))
    return Ema(EmaSelector(slots=slots, warmup_rounds=2, update_interval=2))


MAKERS = (adaptive, measured, bucketed, ema)
Played = list[tuple[int, float, int]]  # running requests, acceptance, drafter version


def play(selector: Selector, rounds: Played, seed: int) -> list[Choice]:
    rng, chosen = random.Random(seed), []
    for running, rate, version in rounds:
        behind = rng.randrange(20 * running)
        view = RoundView(running, 200 * running, behind, rng.choice((0.0, 1.0)), version)
        choice = selector.choose(view)
        chosen.append(choice)
        nodes = running * choice.strategy.num_draft_tokens
        seconds = StageSeconds(1e-4, 1e-3, 1e-2 + 1e-5 * nodes * rng.uniform(0.8, 1.3), 1e-3)
        selector.record(outcome(choice.strategy, view, (rate,) * 8, seconds, rng))
    return chosen


def moved(selector: Selector, make: Callable[[int], Selector]) -> Selector:
    """Through JSON into a fresh one."""
    state = selector_state(selector, "here")
    assert state is not None
    other = make(99)
    assert restore_selector(other, SelectorState(**json.loads(json.dumps(asdict(state), allow_nan=False))), "here")
    return other


played = st.lists(
    st.tuples(st.sampled_from([1, 2, 5, 9, 32]), st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([-1, 0, 1])),
    min_size=1,
    max_size=80,
).map(lambda rounds: sorted(rounds, key=lambda r: r[2]))


@pytest.mark.parametrize("make", MAKERS)
@settings(deadline=None, max_examples=60)
@given(played, st.floats(0, 1), st.integers(0, 1000))
def test_choices_are_those_of_the_selector_that_was_left_alone(
    make: Callable[[int], Selector], rounds: Played, share: float, seed: int
) -> None:
    cut = round(share * len(rounds))
    alone, killed = make(0), make(0)
    before = play(alone, rounds[:cut], seed)
    assert str(play(killed, rounds[:cut], seed)) == str(before)
    other = moved(killed, make)
    assert str(play(other, rounds[cut:], seed + 1)) == str(play(alone, rounds[cut:], seed + 1))  # NaN is no equal
    assert isinstance(alone, Learns) and isinstance(other, Learns) and other.state() == alone.state()


@pytest.mark.parametrize("make", MAKERS)
def test_what_does_not_fit_changes_nothing(make: Callable[[int], Selector]) -> None:
    selector = make(0)
    play(selector, [(4, 0.9, 0)] * 20, 1)
    assert isinstance(selector, Learns)
    before = selector.state()
    state = SelectorState("there", before)
    assert not restore_selector(selector, state, "here"), "of another card: its seconds are not ours"
    assert not restore_selector(selector, SelectorState("here", {"kind": "another"}), "here")
    assert selector.state() == before


def test_a_selector_that_learns_nothing_has_no_state() -> None:
    fixed = Fixed(OFF)
    assert selector_state(fixed, "here") is None
    assert not restore_selector(fixed, SelectorState("here", adaptive().state()), "here")


def test_strategies_may_have_changed_meanwhile() -> None:
    selector = adaptive()
    play(selector, [(2, 0.9, 0)] * 60, 1)
    fewer = Adaptive((OFF, chain(2)), CostModel(), AcceptanceModel())
    assert restore_selector(fewer, SelectorState("", selector.state()), "")
    assert {c.strategy for c in play(fewer, [(2, 0.9, 0)] * 20, 2)} <= {OFF, chain(2)}
    slots = (DepthSlot(min_running=1, depths=(0, 1, 2)),)
    deep, shallow = ema(), Ema(EmaSelector(slots=slots))
    play(deep, [(2, 0.9, 0)] * 60, 1)
    assert restore_selector(shallow, SelectorState("", deep.state()), "")
    assert play(shallow, [(2, 0.5, 0)], 2)[0].strategy.depth <= 2


def form(value: Any) -> Any:
    """Names and shapes of a state. Lists of rows are told by their first."""
    if isinstance(value, dict):
        return {str(name): form(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [form(value[0]), "..."] if value and isinstance(value[0], list | tuple | dict) else len(value)
    return "plain"


FORMS = {
    "adaptive 2": (measured, "4c9f35577a53"),
    "bucketed": (bucketed, "3ba02667685c"),
    "ema": (ema, "fb3271620287"),
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_state_of_another_form_has_another_kind(kind: str) -> None:
    """What a checkpoint of an earlier version holds is not taken up, and must not end the server: whoever changes what
    is printed here gives it another number, and then the digest above."""
    make, known = FORMS[kind]
    selector = make(0)
    play(selector, [(n, 0.9, v) for v in (0, 1) for n in (1, 4, 32)] * 40, 1)
    assert isinstance(selector, Learns)
    told = json.dumps(form(json.loads(json.dumps(selector.state()))), sort_keys=True, indent=1)
    digest = hashlib.sha256(told.encode()).hexdigest()[:12]
    assert (selector.state()["kind"], digest) == (kind, known), told
