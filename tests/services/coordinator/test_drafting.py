"""Slots that join and leave: what a leaving one costs the slot, and what a joining one finds."""

from __future__ import annotations

from tests.services.coordinator.world import World, tiny_config

SNAPSHOT_S = 3.0
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
