from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import threading

import pytest
import torch

from services.core.errors import BatchError, StaleEpochError, WeightError
from services.core.types import DrafterProgress, HiddenStateChunk
from services.drafter.service import build_drafter_service, evenly
from services.drafter.state import initial_drafter_state
from services.models.eagle import Eagle
from services.models.files import read_config, read_tensors
from services.models.hidden import HiddenStates
from services.models.layers import model_spec


def chunk_of(states, step=0) -> HiddenStateChunk:
    return HiddenStateChunk(
        states[0].policy_version,
        step,
        len(states),
        sum(len(s.input_ids) for s in states),
        sum(s.num_bytes for s in states),
    )


class Ticks:
    """A clock that advances by `by` seconds whenever it is read."""

    def __init__(self, by: float = 1.0) -> None:
        self.counter = itertools.count()
        self.by = by

    def __call__(self) -> float:
        return next(self.counter) * self.by


@pytest.fixture
def build(model_folder, make_config):
    folder = model_folder()

    def make(slot: int = 0, clock=None, **drafter):
        config = make_config(folder, **drafter)
        return build_drafter_service(config, slot, clock or Ticks()), initial_drafter_state(config)

    return make


@pytest.fixture
def states(make_states):
    return make_states((3, 9), (2, 20), (4, 2), (3, 40), (2, 6))


def test_train_needs_a_lease_a_state_and_data(build, states) -> None:
    service, state = build()
    for call in (lambda: service.train(1.0, 0), lambda: service.snapshot(0)):
        with pytest.raises(StaleEpochError, match="call begin"):
            call()
    assert service.begin(state, epoch=4) == 0
    progress = service.train(1.0, 4)
    assert progress.micro_steps == progress.num_tokens == 0 and math.isnan(progress.loss)
    service.add_chunk(chunk_of(states), states)
    progress = service.train(3.5, 4)
    assert progress.micro_steps == progress.total_steps == 4 and math.isfinite(progress.loss)
    assert progress.buffer is not None and progress.buffer.num_sequences > 0 < progress.buffer.num_bytes
    assert len(progress.expected_acceptance) == 4 and all(0 <= a <= 1 for a in progress.expected_acceptance)
    for epoch in (3, 5):
        with pytest.raises(StaleEpochError):
            service.train(1.0, epoch)
    with pytest.raises(StaleEpochError):
        service.begin(state, epoch=3)
    assert service.train(0.001, 4).micro_steps == 1, "at least one, however short the budget"


def test_a_refused_state_keeps_epoch_and_drafter(build, states) -> None:
    service, state = build()
    service.begin(state, 1)
    service.add_chunk(chunk_of(states), states)
    service.train(2.0, 1)
    kept = service.snapshot(1)
    with pytest.raises(WeightError):
        service.begin(state | {"tensors": {}}, 2)
    assert service.snapshot(1)[0] == kept[0]


def test_training_moved_between_slots_equals_training_in_one(build, make_states) -> None:
    """Lease 1 in slot 0, lease 2 in slot 1, lease 3 back in slot 0: bit for bit what one slot would have made. The
    buffer holds far more than a micro-step takes, so the draws must move with the state too."""
    states = make_states(*((2, 5 + k) for k in range(30)))
    (alone, state), (a, _), (b, _) = (build(slot, pack_tokens=64) for slot in (0, 0, 1))
    for service in (alone, a, b):
        service.add_chunk(chunk_of(states), states)
    alone.begin(state, 1)
    for _ in range(3):
        alone.train(2.5, 1)
    moving = state
    for epoch, service in ((1, a), (2, b), (3, a)):
        service.begin(pickle.loads(pickle.dumps(moving)), epoch)
        service.train(2.5, epoch)
        steps, moving = service.snapshot(epoch)
    total, expected = alone.snapshot(1)
    assert steps == total == expected["total_steps"] == 9
    assert all(torch.equal(moving["tensors"][n], expected["tensors"][n]) for n in expected["tensors"])
    for part, moments in expected["optimizer"].items():
        assert all(torch.equal(moving["optimizer"][part][n], moments[n]) for n in moments)


def test_lanes_draw_their_own_data_and_their_average_has_learned(build, states) -> None:
    """Two slots that begin alike must not do the same work; what they come to together is no worse than either."""
    first, state = build(learning_rate=5e-3, pack_tokens=64)
    second, _ = build(learning_rate=5e-3, pack_tokens=64)
    parts = []
    for lane, service in enumerate((first, second)):
        service.add_chunk(chunk_of(states), states)
        service.begin(state, 1, lane)
        steps = service.train(10.0, 1).micro_steps
        parts.append((service.snapshot(1)[1], steps))
    (one, n), (two, m) = parts
    assert any(not torch.equal(one["tensors"][k], two["tensors"][k]) for k in one["tensors"])
    total, merged = first.merge([one, two], [n, m])
    assert total == merged["total_steps"] == n + m and merged["updates"] == max(one["updates"], two["updates"])
    frozen, a, b, both = first.estimate({"frozen": state, "a": one, "b": two, "both": merged}, states)
    assert both.acceptance_length > frozen.acceptance_length
    assert both.acceptance_length > min(a.acceptance_length, b.acceptance_length) - 0.02
    second.begin(merged, 2, 0)
    assert second.snapshot(2)[0] == n + m


def test_an_interrupt_ends_training_with_the_micro_step_under_way(build, states) -> None:
    under_way = threading.Event()

    def clock() -> float:
        """Asked once at the beginning, and again after each micro-step."""
        if ticks() > 0:
            under_way.set()
        return 0.0  # the budget is never used up

    ticks = Ticks()
    service, state = build(clock=clock)
    service.add_chunk(chunk_of(states), states)
    service.begin(state, 3)
    service.interrupt(2)  # of a lease that is over: nothing happens
    answers: list[DrafterProgress] = []
    thread = threading.Thread(target=lambda: answers.append(service.train(60.0, 3)))
    thread.start()
    assert under_way.wait(120.0), "no micro-step"
    service.interrupt(3)
    thread.join(120.0)
    assert answers and answers[0].micro_steps >= 1
    assert service.train(60.0, 3).micro_steps == 0, "also a call that was on its way"
    service.begin(state, 4)
    assert service.train(0.0, 4).micro_steps == 1


def test_export_is_the_trainable_tensors_only(build) -> None:
    service, state = build()
    count, tensors = service.export(state)
    assert count == len(tensors) and tensors.keys() == state["tensors"].keys()
    assert not any("embed" in n or "lm_head" in n for n in tensors)
    assert all(torch.equal(tensors[name], t) for name, t in state["tensors"].items())


def test_estimate_compares_drafters_on_the_same_states(build, states) -> None:
    service, state = build(learning_rate=5e-3)
    service.begin(state, 1)
    service.add_chunk(chunk_of(states), states)
    service.train(30.0, 1)
    _, later = service.snapshot(1)
    frozen, live = service.estimate({"frozen": state, "live": later}, states)
    assert (frozen.drafter, live.drafter) == ("frozen", "live") and frozen.num_tokens == live.num_tokens
    assert live.acceptance_length > frozen.acceptance_length >= 1.0


@pytest.mark.parametrize("change", [{"num_sequences": 4}, {"num_tokens": 1}, {"policy_version": 3}])
def test_a_chunk_must_be_what_it_says(build, states, change) -> None:
    service, _ = build()
    with pytest.raises(BatchError, match="chunk of step 0 says"):
        service.add_chunk(dataclasses.replace(chunk_of(states), **change), states)


def test_empty_chunk_and_foreign_hidden_size(build, make_states) -> None:
    service, _ = build()
    service.add_chunk(HiddenStateChunk(0, 0, 0, 0, 0), [])
    wide = make_states((3, 9), hidden=64)
    with pytest.raises(BatchError, match="reached a drafter"):
        service.add_chunk(chunk_of(wide), wide)


@pytest.mark.parametrize("tied", [True, False])
def test_target_head_follows_the_policy(model_folder, make_config, tied, states) -> None:
    folder = model_folder(tied=tied)
    config = make_config(folder)
    service = build_drafter_service(config, 0, Ticks())
    spec = model_spec(read_config(folder))
    published = {n: t for n, t in read_tensors(folder).items() if not (tied and n == "lm_head.weight")}
    state = initial_drafter_state(config)
    before = service.estimate({"d": state}, states)
    service.load_target_head(2, published)
    assert service.estimate({"d": state}, states) == before, "version 0 came from the same folder"
    moved = {n: t * 0.5 for n, t in published.items()}
    service.load_target_head(3, moved)
    after = service.estimate({"d": state}, states)
    for t in moved.values():
        t.zero_()  # the trainer goes on writing into its tensors
    assert after != before and service.estimate({"d": state}, states) == after
    with pytest.raises(WeightError, match="already has version 3"):
        service.load_target_head(1, published)
    for bad in (
        {},
        {n: t for n, t in published.items() if "embed" not in n},
        {n: t[:-1] for n, t in published.items()},
    ):
        with pytest.raises(WeightError, match="nothing changed"):
            service.load_target_head(4, bad)
    assert service.estimate({"d": state}, states) == after
    assert state["tensors"].keys() == Eagle(spec).names().keys()


def test_estimates_use_an_even_selection() -> None:
    states = [
        HiddenStates(torch.zeros(n, dtype=torch.long), torch.zeros(n, 2), torch.ones(n, dtype=torch.bool), 0)
        for n in (10, 20, 30) * 20
    ]
    assert evenly(states, 10_000) == states
    some = evenly(states, 300)
    assert 200 <= sum(len(h.input_ids) for h in some) <= 400 and {len(h.input_ids) for h in some} == {10, 20, 30}
    assert len(evenly(states[:1], 1)) == 1


def test_an_eagle3_slot_trains_on_its_own_kind_of_chunk(model_folder, make_config, make_states) -> None:
    config = make_config(model_folder(name="eagle3"), method="eagle3")
    service, state = build_drafter_service(config, 0, Ticks()), initial_drafter_state(config)
    states = make_states((3, 9), (2, 20), name="eagle3")
    with pytest.raises(BatchError, match="reached a drafter"):
        service.add_chunk(chunk_of(make_states((3, 9))), make_states((3, 9)))
    service.begin(state, 1)
    service.add_chunk(chunk_of(states), states)
    assert service.train(2.0, 1).micro_steps > 0
    _, later = service.snapshot(1)
    frozen, live = service.estimate({"frozen": state, "live": later}, states)
    assert live.acceptance_length != frozen.acceptance_length
    count, tensors = service.export(later)
    assert count == len(tensors) and {"norm.weight", "layers.0.hidden_norm.weight"} <= tensors.keys()
