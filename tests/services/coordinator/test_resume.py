"""A run that goes on from a checkpoint, on fakes: what is done again, what is not, and whose prompts come next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.coordinator.control import ControlRequest
from services.coordinator.coordinator import Coordinator
from services.coordinator.resume import RunMemory, Takeover, drafter_version_after
from services.coordinator.services import Inputs
from services.core.checkpoints import CheckpointNote, read_note
from services.core.errors import ControlRefusedError, StopRequested
from services.core.types import RunEvent, ServedVersions
from tests.services.coordinator.fakes import SAMPLING, make_prompts
from tests.services.coordinator.world import World, tiny_config


def config_of(**run: Any) -> Any:
    return tiny_config(run={"steps": 6, "eval_prompts": 5, "checkpoint_every": 2, **run})


def resumed(before: World, at: int, **changes: Any) -> World:
    """A new world that goes on from the checkpoint of step `at` of `before`; `changes` of its run section."""
    world = World(changes.pop("config", before.config), **changes)
    note, live, served = next(c for c in before.policy.instance.checkpoints if c[0].step == at)
    note = read_note(note.as_dict())  # as it comes out of the manifest
    policy = world.policy.instance
    policy.kept = note, live, served
    policy.version = before.observer.steps[at - 1].policy_version
    takeover = Takeover(
        1,
        before.clock(),
        tuple(before.observer.steps[:at]),
        tuple(e for e in before.observer.evaluations if e.step <= at),
        resumed=True,
    )
    args = world.config, world.inputs, world.services, world.observer, world.clock
    world.coordinator = Coordinator(*args, takeover)
    return world


def drawn(world: World) -> list[Any]:
    return [
        (b.step, [(r.prompt_id, r.rollout_id, r.response_ids) for r in b.rollouts])
        for b in world.policy.instance.batches
    ]


def told(world: World, kind: str) -> list[RunEvent]:
    return [e for e in world.observer.events if e.kind == kind]


@pytest.mark.parametrize("at", [2, 4, 6])
def test_steps_after_the_checkpoint_are_done_again_and_no_other(at: int) -> None:
    calm = World(config_of())
    calm.coordinator.run()
    assert [c[0].step for c in calm.policy.instance.checkpoints] == [2, 4, 6] and calm.policy.instance.flushed == 3
    world = resumed(calm, at)
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and summary["steps"] == 6
    assert drawn(world) == drawn(calm)[at:]
    assert [e.step for e in world.observer.evaluations] == ([6] if at < 6 else [])
    assert all(m.at_s > calm.observer.steps[at - 1].at_s for m in world.observer.steps), "the clock went back"
    (event,) = told(world, "run_resumed")
    assert f"after step {at} of 6" in event.message and "tokens of hidden states" in event.message


def test_the_drafter_goes_on_under_its_version() -> None:
    calm = World(config_of())
    calm.coordinator.run()
    note, live, _ = calm.policy.instance.checkpoints[1]
    assert note.drafter_version and note.drafter_version > 0 and live["trained"] > 0
    world = resumed(calm, 4)
    world.coordinator.run()
    first = world.policy.instance.batches[0].rollouts
    assert {r.drafter_versions for r in first} == {(note.drafter_version,)}
    begun = [d.instance.state["trained"] for d in world.drafters if d.instance.state]
    assert begun and min(begun) > live["trained"], "training went on from the checkpoint's state"


def test_a_stopped_run_leaves_a_checkpoint_of_its_last_step() -> None:
    world = World(config_of(checkpoint_every=100))

    def watch(view: Any) -> None:
        if view.step == 4 and view.phase == "rollout" and view.rollouts_running:
            world.coordinator.stop()

    world.observer.watch = watch
    with pytest.raises(StopRequested):
        world.coordinator.run()
    assert [c[0].step for c in world.policy.instance.checkpoints] == [3] and world.policy.instance.flushed == 1
    again = resumed(world, 3)
    assert again.coordinator.run()["status"] == "finished" and drawn(again)[0][0] == 4


def test_a_stop_while_the_policy_is_ahead_of_the_records_writes_nothing() -> None:
    world = World(config_of(checkpoint_every=100))
    world.observer.watch = lambda view: world.coordinator.stop() if (view.step, view.phase) == (3, "publish") else None
    with pytest.raises(StopRequested):
        world.coordinator.run()
    assert world.policy.instance.checkpoints == []


def test_checkpoints_can_be_asked_for_and_be_off() -> None:
    off = World(config_of(checkpoint_every=0))
    with pytest.raises(ControlRefusedError, match="checkpoint_every"):
        off.coordinator.control.ask(ControlRequest("checkpoint"))
    off.coordinator.run()
    assert off.policy.instance.checkpoints == []
    world = World(config_of(checkpoint_every=100, keep_best=1, eval_every=4))
    ask = ControlRequest("checkpoint")
    world.observer.watch = lambda v: world.coordinator.control.ask(ask) if (v.step, v.phase) == (2, "reward") else None
    world.coordinator.run()
    notes = [c[0] for c in world.policy.instance.checkpoints]
    # on demand, at an evaluation that may be the best, at the end
    assert [n.step for n in notes] == [2, 4, 6]
    assert all(read_note(n.as_dict()) == n for n in notes)


def test_an_epoch_boundary_resumes_into_the_next_epoch() -> None:
    """Row 37: 12 prompts, 6 a step: the first pass ends with step 2, where the checkpoint is."""
    calm = World(config_of(steps=4), train_prompts=12)
    calm.coordinator.run()
    world = resumed(calm, 2, train_prompts=12)
    summary = world.coordinator.run()
    assert summary["steps"] == 4 and [b.step for b in world.policy.instance.batches] == [3, 4]
    by_step = {step: {prompt for prompt, _, _ in rollouts} for step, rollouts in drawn(calm) + drawn(world)}
    assert by_step[1] | by_step[2] == by_step[3] | by_step[4] == {f"p{i}" for i in range(12)}
    assert drawn(world) == drawn(calm)[2:]


def test_another_prompt_set_begins_at_its_first_prompt_and_is_told() -> None:
    """Row 38: the position in the old set would skip the new one's first rows."""
    calm = World(config_of(steps=4))
    calm.coordinator.run()
    fresh = World(config_of(steps=4))
    others = Inputs(make_prompts(20, start=500), fresh.inputs.heldout, SAMPLING)

    def with_others(at: int, before: World) -> World:
        world = resumed(before, at)
        world.inputs = others
        args = world.config, others, world.services, world.observer, world.clock
        world.coordinator = Coordinator(*args, world.coordinator._takeover)
        world.coordinator.run()
        return world

    changed = with_others(2, calm)
    fresh.coordinator = Coordinator(fresh.config, others, fresh.services, fresh.observer, fresh.clock)
    fresh.coordinator.run()
    prompts = [[p for p, _, _ in rollouts] for _, rollouts in drawn(changed)]
    assert prompts == [[p for p, _, _ in rollouts] for _, rollouts in drawn(fresh)][:2], "not from its first prompt on"
    (event,) = told(changed, "prompts_changed")
    assert "step 3 takes the first of the new set" in event.message
    # resumed once more with the same new set: its position is kept
    note = changed.policy.instance.checkpoints[-1][0]
    assert (note.step, note.data.since) == (4, 2)
    assert not told(resumed_quietly(changed, others), "prompts_changed")


def resumed_quietly(before: World, inputs: Inputs) -> World:
    world = World(config_of(steps=5))
    note, live, served = before.policy.instance.checkpoints[-1]
    world.policy.instance.kept, world.policy.instance.version = (note, live, served), note.step
    args = world.config, inputs, world.services, world.observer, world.clock
    world.coordinator = Coordinator(*args, Takeover(1, 0.0, resumed=True))
    world.coordinator.run()
    return world


def test_a_run_without_a_checkpoint_begins_again() -> None:
    world = World(config_of(steps=2))
    args = world.config, world.inputs, world.services, world.observer, world.clock
    world.coordinator = Coordinator(*args, Takeover(1, 7.0, resumed=True))
    assert world.coordinator.run()["steps"] == 2
    assert "no checkpoint was written" in told(world, "run_resumed")[0].message
    assert world.observer.evaluations[0].step == 0


def test_a_missing_evaluation_at_the_checkpoint_is_made_up_for() -> None:
    calm = World(config_of(eval_every=2))
    calm.coordinator.run()
    world = resumed(calm, 4)
    assert world.coordinator._takeover is not None
    without = tuple(e for e in world.coordinator._takeover.evaluations if e.step != 4)
    args = world.config, world.inputs, world.services, world.observer, world.clock
    world.coordinator = Coordinator(*args, replace(world.coordinator._takeover, evaluations=without))
    world.coordinator.run()
    assert [e.step for e in world.observer.evaluations] == [4, 6]


@pytest.mark.parametrize(
    ("known", "served", "version"), [(0, [], 0), (3, [None, None], 3), (3, [2, None], 4), (0, [5, 4], 6)]
)
def test_a_drafter_version_is_used_again_only_when_no_server_has_one(
    known: int, served: list[int | None], version: int
) -> None:
    assert drafter_version_after(known, [ServedVersions(1, d) for d in served]) == version


def test_the_memory_begins_with_what_the_run_folder_knew() -> None:
    calm = World(config_of())
    calm.coordinator.run()
    before = Takeover(2, 50.0, tuple(calm.observer.steps[:2]), tuple(calm.observer.evaluations[:1]), 4, 1, resumed=True)
    memory = RunMemory.of(calm.observer, before)
    next_one = memory.takeover(60.0)
    assert next_one == replace(before, incarnation=3, elapsed_s=60.0, resumed=False)
    assert RunMemory.of(calm.observer, None).takeover(1.0) == Takeover(1, 1.0)


def test_a_note_of_another_form_is_refused() -> None:
    with pytest.raises((KeyError, TypeError)):
        read_note({"step": 3})
    with pytest.raises(TypeError):
        read_note({**CheckpointNote(1, None, World().coordinator.checkpoints.data).as_dict(), "data": {"x": 1}})
