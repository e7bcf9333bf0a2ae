"""What selectors have learned outlives their server, and the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.core.selector import SelectorState
from services.core.types import RunEvent
from tests.services.coordinator.fakes import FakeRollout
from tests.services.coordinator.test_resume import config_of, resumed
from tests.services.coordinator.world import World


def told(world: World) -> list[RunEvent]:
    return [e for e in world.observer.events if e.kind == "selector_restored"]


def test_a_server_that_is_replaced_goes_on_with_what_its_slot_had_learned() -> None:
    world, known = World(config_of()), []

    def watch(view: Any) -> None:
        if (view.step, view.phase) == (3, "rollout") and not known and view.rollouts_running:
            known.append(world.coordinator._selectors.known)
            world.servers[1].kill()
            world.servers[1].restart()

    world.observer.watch = watch
    assert world.coordinator.run()["status"] == "finished"
    ((zero, one),) = known
    assert one.learned["rounds"] > 0 and zero.place == "slot 0"
    fresh = world.servers[1].instance
    assert fresh.restored == [one], "of the last step's end, once, before any weights"
    assert fresh.rounds > one.learned["rounds"]
    assert world.servers[0].instance.restored == []
    (event,) = told(world)
    assert event.subject == "rollout-1" and "goes on with what it had learned" in event.message


def test_a_resumed_run_gives_every_server_what_the_checkpoint_has() -> None:
    calm = World(config_of())
    calm.coordinator.run()
    notes = {c[0].step: c[0] for c in calm.policy.instance.checkpoints}
    assert [s.place for s in notes[4].selectors] == ["slot 0", "slot 1"]
    pairs = zip(notes[2].selectors, notes[4].selectors, strict=True)
    assert all(a.learned["rounds"] < b.learned["rounds"] for a, b in pairs)
    world = resumed(calm, 4)
    world.coordinator.run()
    assert [s.instance.restored for s in world.servers] == [[state] for state in notes[4].selectors]
    assert len(told(world)) == 2


def test_what_does_not_fit_is_told_and_left() -> None:
    calm = World(config_of())
    calm.coordinator.run()
    checkpoints = calm.policy.instance.checkpoints
    strange = (SelectorState("another card", {"kind": "fake", "rounds": 10**6}), None)
    note, *states = checkpoints[1]
    checkpoints[1] = (replace(note, selectors=strange), *states)
    world = resumed(calm, 4)
    world.coordinator.run()
    (event,) = told(world)
    assert "begins anew" in event.message and event.subject == "rollout-0"
    assert world.servers[0].instance.rounds < 10**6 and world.servers[1].instance.restored == []


def test_what_is_known_of_the_drafters_worth_goes_on() -> None:
    """At the checkpoint's step: a coordinator that takes over later in the run knows nothing that is newer."""
    calm = World(config_of())
    calm.coordinator.run()
    note = next(c[0] for c in calm.policy.instance.checkpoints if c[0].step == 4)
    assert note.worth is not None and note.worth["levels"]
    world = resumed(calm, 4)
    before: list[Any] = []
    world.observer.watch = lambda view: before.append(world.coordinator._worth.state()) if view.step == 5 else None
    world.coordinator.run()
    assert before[0] == {**note.worth, "levels": [tuple(level) for level in note.worth["levels"]]}


def test_a_server_without_a_learning_selector_is_left_alone() -> None:
    class Fixed(FakeRollout):
        def selector_state(self) -> Any:
            return None

    world = World(config_of())
    for slot, server in enumerate(world.servers):
        server.instance = Fixed(slot, world.clock, 12)
    world.coordinator.run()
    assert {c[0].selectors for c in world.policy.instance.checkpoints} == {(None, None)}
