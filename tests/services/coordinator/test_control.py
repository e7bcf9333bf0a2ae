"""Pause, resume, stop and the forced strategy in whole runs on simulated services; what is refused, and why."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from services.coordinator.control import Control, ControlRequest, forceable
from services.core.errors import ControlRefusedError, StopRequested
from services.core.types import ControlState, ProgressView, RunEvent
from tests.services.coordinator.world import SGLANG, CoordinatorKilled, Recorder, World, tiny_config

EAGLE = "eagle_3_1_4"


def control(state: ControlState = ControlState(), checkpoints: bool = False) -> Control:  # noqa: B008
    return Control((EAGLE, "off"), state, checkpoints)


def at_step(world: World, step: int, act: Any, phase: str = "rollout") -> None:
    """Call `act` once, when the run is in that phase of that step."""
    acted: list[ProgressView] = []

    def watch(view: ProgressView) -> None:
        if not acted and (view.step, view.phase) == (step, phase):
            acted.append(view)
            act(world.coordinator.control)

    world.observer.watch = watch


def resume_after(world: World, seconds: float) -> None:
    """Resume once the simulated clock has gone on for that long in a pause."""
    asleep, wait = world.host._sleep, ControlRequest("resume")
    begun: list[float] = []

    def sleep(duration: float) -> None:
        asleep(duration)
        if world.coordinator.latest().phase == "paused":
            begun.append(world.clock())
            if world.clock() - begun[0] > seconds:
                world.coordinator.control.ask(wait)

    world.host._sleep = sleep


def test_a_paused_run_finishes_its_step_waits_with_free_slots_and_goes_on() -> None:
    world = World()
    at_step(world, 1, lambda c: c.ask(ControlRequest("pause")))
    resume_after(world, 60.0)  # longer than any lease or call may take
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and summary["steps"] == 3
    kinds = [e.kind for e in world.observer.events if e.kind in ("paused", "resumed", "slot_lost")]
    assert kinds == ["paused", "resumed"]
    (paused,) = [e for e in world.observer.events if e.kind == "paused"]
    assert paused.at_s >= world.observer.steps[0].at_s, "in the middle of a step"
    spans = [s for s in world.observer.spans if s.label == "paused"]
    waited = sum(s.end_s - s.start_s for s in spans if s.slot == "slot 0" and s.role == "idle")
    assert waited > 60 and {s.role for s in spans if s.end_s - s.start_s > 1} == {"idle"}
    views = [v for v in world.observer.views if v.phase == "paused"]
    assert views and set(views[-1].slots.values()) <= {"idle", "rollout"}
    assert views[0].control.paused and not world.observer.views[-1].control.paused
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(world.observer.views))


def test_the_pause_changes_nothing_of_what_is_learnt() -> None:
    plain, paused = World(), World()
    at_step(paused, 2, lambda c: c.ask(ControlRequest("pause")))
    resume_after(paused, 5.0)
    plain.coordinator.run(), paused.coordinator.run()
    ids = [[tuple(r.response_ids) for b in w.policy.instance.batches for r in b.rollouts] for w in (plain, paused)]
    assert sorted(ids[0]) == sorted(ids[1])


def test_a_paused_run_stops_on_request() -> None:
    world = World()
    at_step(world, 1, lambda c: c.ask(ControlRequest("pause")))
    asleep = world.host._sleep

    def sleep(seconds: float) -> None:
        asleep(seconds)
        if world.coordinator.latest().phase == "paused":
            world.coordinator.control.ask(ControlRequest("stop"))

    world.host._sleep = sleep
    with pytest.raises(StopRequested):
        world.coordinator.run()
    assert [(s["status"], s["steps"]) for s in world.observer.summaries] == [("stopped", 1)]


def test_a_forced_strategy_is_used_from_the_next_step_on_and_given_back() -> None:
    world = World(tiny_config(run={"steps": 4, "eval_prompts": 0}))

    def watch(view: ProgressView) -> None:
        if (view.step, view.phase) == (1, "reward"):
            world.coordinator.control.ask(ControlRequest("selector", "off"))
        if (view.step, view.phase) == (3, "reward"):
            world.coordinator.control.ask(ControlRequest("selector", None))

    world.observer.watch = watch
    world.coordinator.run()
    used = [set(m.steps_by_strategy) for m in world.observer.steps]
    assert used == [{"eagle"}, {"off"}, {"off"}, {"eagle"}]
    told = [e.message for e in world.observer.events if e.kind == "strategy_forced"]
    assert told == ["strategy off on request", "the selector chooses again"]


def test_a_strategy_chosen_during_a_pause_holds_after_it_and_leaves_slots_free() -> None:
    world = World(tiny_config(run={"steps": 2, "eval_prompts": 0}))

    def pause_and_choose(c: Control) -> None:
        c.ask(ControlRequest("pause"))

    at_step(world, 1, pause_and_choose)
    asleep, turns = world.host._sleep, []

    def sleep(seconds: float) -> None:
        asleep(seconds)
        if world.coordinator.latest().phase != "paused":
            return
        turns.append(set(world.coordinator._slots().values()))
        if len(turns) == 3:
            world.coordinator.control.ask(ControlRequest("selector", "off"))
        if len(turns) == 8:
            world.coordinator.control.ask(ControlRequest("resume"))

    world.host._sleep = sleep
    world.coordinator.run()
    assert turns == [{"idle"}] * len(turns)
    assert [set(m.steps_by_strategy) for m in world.observer.steps] == [{"eagle"}, {"off"}]


def test_the_next_coordinator_keeps_the_pause_and_the_forced_strategy() -> None:
    world = World(tiny_config(run={"steps": 3, "eval_prompts": 0}))
    killed: list[int] = []

    def watch(view: ProgressView) -> None:
        if (view.step, view.phase) == (1, "rollout"):
            world.coordinator.control.ask(ControlRequest("selector", "off"))
            world.coordinator.control.ask(ControlRequest("pause"))
        if view.phase == "paused" and not killed:
            killed.append(view.step)
            raise CoordinatorKilled

    world.observer.watch = watch
    resume_after(world, 5.0)
    assert world.run_with_takeovers()["status"] == "finished"
    assert [e.kind for e in world.observer.events].count("paused") == 1  # the first one died while it said so
    assert [set(m.steps_by_strategy) for m in world.observer.steps] == [{"eagle"}, {"off"}, {"off"}]


@pytest.mark.parametrize("name", ["eagle_9_1_10", "", "OFF", "../off"])
def test_an_unknown_strategy_is_refused_with_those_that_are_known(name: str) -> None:
    asked = control()
    with pytest.raises(ControlRefusedError, match=f"one of {EAGLE}, off"):
        asked.ask(ControlRequest("selector", name))
    assert asked.state == ControlState()


def test_a_checkpoint_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(ControlRefusedError, match=r"run\.checkpoint_every above 0"):
        control().ask(ControlRequest("checkpoint"))


def checkpointed(world: World) -> list[int]:
    return [note.step for note, _, _ in world.policy.instance.checkpoints]


def test_a_checkpoint_is_of_the_step_under_way_and_on_the_disk_when_it_is_told() -> None:
    world = World(tiny_config(run={"steps": 4, "eval_prompts": 0, "checkpoint_every": 100}))
    at_step(world, 2, lambda c: c.ask(ControlRequest("checkpoint")))
    flushed: list[int] = []

    class Looking(Recorder):
        def event(self, event: RunEvent) -> None:
            super().event(event)
            if event.kind == "checkpoint":
                flushed.append(world.policy.instance.flushed)

    world.observer = Looking(watch=world.observer.watch)
    world.replace_services()
    world.coordinator.run()
    assert checkpointed(world) == [2, 4] and flushed == [1]
    assert [e.message for e in world.observer.events if e.kind == "checkpoint"] == ["step 2 is on the disk"]


def test_a_checkpoint_is_written_during_a_pause() -> None:
    world = World(tiny_config(run={"steps": 3, "eval_prompts": 0, "checkpoint_every": 100}))
    at_step(world, 1, lambda c: c.ask(ControlRequest("pause")))
    asked: list[float] = []
    asleep = world.host._sleep

    def sleep(seconds: float) -> None:
        asleep(seconds)
        if world.coordinator.latest().phase == "paused":
            asked.append(world.clock())
            world.coordinator.control.ask(ControlRequest("checkpoint" if len(asked) < 4 else "resume"))

    world.host._sleep = sleep
    world.coordinator.run()
    assert checkpointed(world) == [1, 3], "asked for again it is the same one"
    kinds = [e.kind for e in world.observer.events if e.kind in ("paused", "checkpoint", "resumed")]
    assert kinds[0] == "paused" and kinds[-1] == "resumed" and "checkpoint" in kinds


def test_a_checkpoint_before_the_first_step_says_that_there_is_nothing_to_keep() -> None:
    world = World(tiny_config(run={"steps": 1, "eval_prompts": 0, "checkpoint_every": 100}))
    world.coordinator.control.ask(ControlRequest("checkpoint"))
    world.coordinator.run()
    (told,) = [e.message for e in world.observer.events if e.kind == "checkpoint"]
    assert told.startswith("no step is done yet") and checkpointed(world) == [1]


def test_a_checkpoint_is_taken_once() -> None:
    asked = control(checkpoints=True)
    asked.ask(ControlRequest("checkpoint"))
    assert (asked.take_checkpoint(), asked.take_checkpoint()) == (True, False)


def test_a_run_that_has_ended_refuses_everything() -> None:
    world = World()
    world.coordinator.run()
    for action in ("pause", "resume", "checkpoint", "stop", "selector"):
        with pytest.raises(ControlRefusedError, match="has ended"):
            world.coordinator.control.ask(ControlRequest(action))  # type: ignore[arg-type]


def test_repeated_requests_change_nothing() -> None:
    asked = control()
    assert asked.ask(ControlRequest("resume")) == "the run was not paused"
    assert asked.ask(ControlRequest("pause")) == asked.ask(ControlRequest("pause"))
    assert asked.ask(ControlRequest("resume")) == "the run goes on" and not asked.state.paused


def test_an_sglang_run_cannot_change_its_strategy() -> None:
    config = tiny_config(rollout={"engine": SGLANG},
                         placement={"gpus_per_slot": 1.0, "policy_gpus": 1.0},
                         run={"steps": 1, "compare_prompts": 0})  # fmt: skip
    assert forceable(config) == (EAGLE,) and forceable(tiny_config()) == (EAGLE, "off")


def test_requests_from_many_threads_leave_one_of_the_asked_states() -> None:
    asked = control()

    def work(i: int) -> None:
        for k in range(200):
            asked.ask(ControlRequest("pause" if (i + k) % 2 else "resume"))
            asked.ask(ControlRequest("selector", (EAGLE, "off", None)[(i + k) % 3]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join(120) for t in threads]
    assert asked.state.forced in (EAGLE, "off", None) and not any(t.is_alive() for t in threads)
