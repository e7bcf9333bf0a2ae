"""Slots that join and leave: what a leaving one costs the slot, and what a joining one finds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.coordinator.fakes import FakeDrafter
from tests.services.coordinator.world import SGLANG, World, tiny_config

SNAPSHOT_S = 3.0
ON_SGLANG = {"rollout": {"engine": SGLANG}, "placement": {"mode": "local"}}
DRAFTER = {"micro_step_budget_s": 0.1, "round_s": 60.0}


def test_a_slot_is_free_with_its_last_micro_step_and_hands_in_afterwards() -> None:
    """Copying a large state takes longer than a micro-step: whoever wants the slot does not wait for that."""
    world = World(tiny_config(run={"steps": 4}, drafter=DRAFTER))
    for drafter in world.drafters:
        drafter.instance.snapshot_s = SNAPSHOT_S
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and summary["drafter_version"] > 0, "what was handed in late was used"
    preempted = world.coordinator._drafting.preempted_s
    # one thread runs all fakes, so the copy for another slot may come between a request and its answer
    assert preempted and sorted(preempted)[len(preempted) // 2] < SNAPSHOT_S


def test_whoever_joins_first_after_a_round_holds_its_state_already() -> None:
    world = World(tiny_config(run={"steps": 6}, drafter=DRAFTER))
    world.coordinator.run()
    trainers = [d.instance for d in world.drafters]
    assert trainers[0].prepared == trainers[1].prepared, "every trainer takes over what a round came to"
    assert len(trainers[0].prepared) > 2 and trainers[0].prepared == sorted(trainers[0].prepared)
    later = [held for t in trainers for trained, held in t.begun if trained]
    assert later and all(later)


def test_what_a_round_came_to_is_judged_before_it_is_taken_over() -> None:
    """Behind a phase rollout waits for the verdict, and a large state takes its time to be taken over."""
    world = World(tiny_config(run={"steps": 6}, drafter=DRAFTER, placement={"policy": "colocated"}))
    deciding, coordinator = [False], world.coordinator
    train, load = coordinator.train_step, coordinator.load

    def trained(batch: Any) -> None:
        deciding[0] = True
        train(batch)

    def loaded() -> None:
        deciding[0] = False
        load()

    class Trainer(FakeDrafter):
        def prepare(self, state: Any) -> None:
            assert not deciding[0]
            super().prepare(state)

    for i, drafter in enumerate(world.drafters):
        drafter.instance = Trainer(i, world.clock)
    coordinator.train_step, coordinator.load = trained, loaded  # type: ignore[method-assign]
    coordinator.run()
    assert all(d.instance.prepared for d in world.drafters)


def test_a_policy_that_shares_the_gpus_does_not_wait_for_what_was_learned() -> None:
    """It begins as soon as nobody trains, while a large state is still being copied."""
    world = World(tiny_config(run={"steps": 4}, drafter=DRAFTER, placement={"policy": "colocated"}))
    for drafter in world.drafters:
        drafter.instance.snapshot_s = SNAPSHOT_S
    drafting, handing = world.coordinator._drafting, list[bool]()
    plain = drafting.leave

    def leave() -> None:
        plain()
        assert not drafting.slots
        handing.append(bool(drafting._round.handing))

    drafting.leave = leave  # type: ignore[method-assign]
    assert world.coordinator.run()["drafter_version"] > 0, "and it is used"
    assert any(handing)


@pytest.mark.parametrize("states", ["policy", "engine"])
def test_a_drafter_that_nobody_trains_gets_no_states(states: str) -> None:
    training = {"when": "never"}
    world = World(tiny_config(**ON_SGLANG, drafter={"states": states, "training": training}))
    assert world.coordinator.run()["drafter_version"] == 0
    assert not any(d.instance.chunks for d in world.drafters)
    assert not any(batch.keep_states for batch in world.policy.instance.batches)
    assert not any(keep for server in world.servers for _, keep in server.instance.asked)
    assert all(step.acceptance_length_live_offline is None for step in world.observer.steps)


@pytest.mark.parametrize("states", ["policy", "engine"])
def test_a_drafter_that_rests_gets_states_for_its_next_try(states: str) -> None:
    """Its verdict is about states that it has not trained on: those of the step that trained, never older ones."""
    training = {"min_gain": 1e9, "drift": 1e9, "patience": 1, "probe_every": 4}
    drafter = {**DRAFTER, "states": states, "training": training}
    world = World(tiny_config(run={"steps": 14}, **ON_SGLANG, drafter=drafter), 200)
    assert world.coordinator.run()["status"] == "finished"
    kept, trained = sorted(set(world.drafters[0].instance.chunks)), [bool(s.drafting_s) for s in world.observer.steps]
    rests = next(e for e in world.observer.events if e.kind == "drafter_rests")
    first = 1 + sum(s.at_s <= rests.at_s for s in world.observer.steps)  # of those that rest
    tries = [i for i, t in enumerate(trained, 1) if t and i >= first]
    assert len(tries) >= 2 and kept == [*range(1, first), *sorted({k for t in tries for k in (t - 1, t)})]
    for step in world.observer.steps:
        assert (step.acceptance_length_live_offline is not None) == (step.step in kept)
