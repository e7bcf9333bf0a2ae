"""When training the drafter pays: rests without gain or drift, wakes on either, tries now and then."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.drafter import DrafterTraining
from services.coordinator.worth import DriftWatch, Worth
from services.core.types import AcceptanceStats, FinishReason, Rollout
from tests.services.coordinator.fakes import SAMPLING

STEP = 7  # any: only `every` counts them
AUTO = DrafterTraining(min_gain=0.01, patience=3, drift=0.05, probe_every=4)


def rollout(length: int, accepted: int, steps: int = 100) -> Rollout:
    """`accepted` draft tokens in `steps` verify steps."""
    stats = AcceptanceStats((steps - accepted, accepted), steps, {"eagle": steps})
    ids, logprobs = (2,) * length, (0.0,) * length
    return Rollout("g", "p", 0, 0, (1,), ids, logprobs, "", FinishReason.STOP, SAMPLING, (0,), (0,), stats)


def test_training_without_gain_rests_after_patience_and_tries_again() -> None:
    worth = Worth(AUTO)
    assert worth.slots(4, STEP) == 4
    assert worth.step([], 0.0) is None and worth.slots(4, STEP) == 1, "barely: one slot is enough to find out"
    assert worth.step([], 0.0) is None
    news = worth.step([], 0.0)
    assert news is not None and "holds" in news and worth.resting
    asked = []
    for _ in range(9):
        asked.append(worth.slots(4, STEP))
        assert worth.step([], None) is None
    assert asked == [0, 0, 0, 0, 1, 0, 0, 0, 1]


def test_a_gain_wakes_it_and_resets_patience() -> None:
    worth = Worth(AUTO)
    for gain in (0.0, 0.0, 0.02, 0.0, 0.0):
        assert worth.step([], gain) is None
    assert worth.step([], 0.0) is not None and worth.resting
    news = worth.step([], 0.02)
    assert news is not None and "pays again" in news and worth.slots(4, STEP) == 4


def test_a_drop_of_acceptance_keeps_it_going_and_wakes_it() -> None:
    worth = Worth(AUTO)
    worth.step([rollout(10, 80)], 0.0)
    worth.step([rollout(10, 80)], 0.0)
    assert worth.step([rollout(10, 50)], 0.0) is None, "acceptance drops: no rest now"
    assert worth.slots(4, STEP) == 4
    for _ in range(12):
        worth.step([rollout(10, 50)], 0.0)
    assert worth.resting
    news = worth.step([rollout(10, 30)], None)
    assert news is not None and "dropped" in news and not worth.resting


def test_longer_responses_are_no_drift() -> None:
    """Acceptance differs by length; another mix of lengths is not another drafter."""
    watch = DriftWatch()
    short, long = rollout(10, 30), rollout(1000, 90)
    assert watch.step([short] * 9 + [long]) == 0.0
    assert abs(watch.step([short] + [long] * 9)) < 1e-12
    assert abs(watch.step([short] * 9 + [long])) < 1e-12
    assert watch.step([rollout(10, 15), long]) > 0


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 100)), min_size=1, max_size=20))
def test_the_same_step_again_is_never_drift(found: list[tuple[int, int]]) -> None:
    watch, rollouts = DriftWatch(), [rollout(n, k) for n, k in found]
    assert watch.step(rollouts) == 0.0
    assert abs(watch.step(rollouts)) < 1e-9


def test_always_and_never_ask_nobody() -> None:
    always, never = (Worth(DrafterTraining(when=w, patience=1)) for w in ("always", "never"))  # type: ignore[arg-type]
    for worth, slots in ((always, 3), (never, 0)):
        worth.step([], 0.0)
        assert worth.slots(3, STEP) == slots


@given(st.integers(1, 5), st.integers(1, 20))
def test_one_step_of_so_many_trains_on_its_own_states_and_those_before(every: int, first: int) -> None:
    worth = Worth(DrafterTraining(when="always", every=every))
    steps = range(first, first + 12)
    trains = [worth.slots(4, step) == 4 for step in steps]
    assert trains == [step % every == 0 for step in steps]
    assert [worth.wants_states(step) for step in steps][:-1] == [now or after for now, after in pairwise(trains)]


@pytest.mark.parametrize("when", ["auto", "never"])
def test_so_many_steps_are_counted_for_always_alone(when: str) -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        DrafterTraining.model_validate({"when": when, "every": 2})


@given(st.integers(1, 6), st.integers(1, 30))
def test_states_are_kept_around_the_steps_that_train(probe_every: int, rested: int) -> None:
    """Those of a step that trains judge what it learned; those of the step before are what it trains on."""
    worth = Worth(DrafterTraining(min_gain=0.01, patience=1, probe_every=probe_every))
    assert worth.wants_states(STEP), "who does not rest trains whenever a slot is idle"
    worth.step([], 0.0)
    assert worth.resting
    trains, kept = list[bool](), list[bool]()
    for _ in range(rested + 1):
        trains.append(worth.slots(4, STEP) > 0)
        kept.append(worth.wants_states(STEP))
        worth.step([], None)
    assert kept[:-1] == [now or after for now, after in pairwise(trains)]


def test_states_that_nobody_would_ever_train_on_are_not_kept() -> None:
    always, never = (Worth(DrafterTraining(when=w, patience=1)) for w in ("always", "never"))  # type: ignore[arg-type]
    for _ in range(3):
        assert always.wants_states(STEP) and not never.wants_states(STEP)
        always.step([], 0.0)
        never.step([], 0.0)


@given(st.lists(st.tuples(st.sampled_from([None, 0.0, 0.02]), st.integers(0, 100)), max_size=20), st.integers(0, 20))
def test_what_is_known_goes_on_elsewhere(told: list[tuple[float | None, int]], cut: int) -> None:
    """As from a checkpoint: through JSON, in another process."""
    kept, moved = Worth(AUTO), Worth(AUTO)
    for worth in (kept, moved):
        for gain, accepted in told[:cut]:
            worth.step([rollout(9, accepted)], gain)
    other = Worth(AUTO)
    other.restore(json.loads(json.dumps(moved.state())))
    assert other.slots(4, STEP) == kept.slots(4, STEP)
    for gain, accepted in told[cut:]:
        assert other.step([rollout(9, accepted)], gain) == kept.step([rollout(9, accepted)], gain)
        assert (other.resting, other.slots(4, STEP)) == (kept.resting, kept.slots(4, STEP))
