"""A machine is lost with everything that lay on it: drafter states and exports made there are gone for good."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.coordinator.world import World, tiny_config


class LostMachine:
    """Takes slot `slot` with its server, trainer and everything the trainer made, in the middle of rollout phases at
    `steps`; another machine takes its place some simulated time later."""

    def __init__(self, world: World, slot: int, steps: tuple[int, ...], back_after_s: float) -> None:
        self._world, self._slot, self._steps, self._back_after_s = world, slot, list(steps), back_after_s
        self._back_s = float("inf")
        self.lost_states = 0
        world.observer.watch = self.watch

    def watch(self, view: Any) -> None:
        server, trainer = self._world.servers[self._slot], self._world.drafters[self._slot]
        now = self._world.clock()
        if now >= self._back_s:
            self._back_s = float("inf")
            server.restart()
            trainer.restart()
        if server.instance and view.phase == "rollout" and view.rollouts_running and view.step in self._steps:
            self._steps.remove(view.step)
            self.lost_states += len(trainer.instance.made)
            trainer.instance.lose_made()
            server.kill()
            trainer.kill()
            self._back_s = now + self._back_after_s


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("back_after_s", [0.3, 2.0, 8.0])
def test_the_run_goes_on_and_the_drafter_with_it(slot: int, back_after_s: float) -> None:
    world = World(tiny_config(run={"steps": 12, "eval_prompts": 4, "compare_prompts": 2, "compare_repeats": 1}))
    machine = LostMachine(world, slot, (2, 4, 7), back_after_s)
    summary = world.coordinator.run()

    assert machine.lost_states and summary["status"] == "finished"
    for step in range(1, 13):
        ids = [r.rollout_id for g in world.observer.groups[step] for r in g.rollouts]
        assert len(ids) == len(set(ids)) == 6 * 4
    versions = [m.drafter_version for m in world.observer.steps]
    assert versions == sorted(versions) and len(set(versions)) > 3, "drafters are still published"
    told = [e.kind for e in world.observer.events]
    assert len(told) < 100, "nobody is lost and found in a circle"


def test_a_lost_state_is_replaced_by_what_a_trainer_that_is_left_holds() -> None:
    world = World(tiny_config(run={"steps": 6, "eval_prompts": 0}))
    held: list[int] = []

    def lose_everything_made_so_far(metrics: Any) -> None:
        if metrics.step == 3:  # no process dies: only what lay in the object stores is gone
            for service in world.drafters:
                service.instance.lose_made()
            held.extend(d.instance.state["trained"] for d in world.drafters if d.instance.state)

    world.observer.step = lose_everything_made_so_far  # type: ignore[method-assign]
    summary = world.coordinator.run()
    assert summary["status"] == "finished"
    told = [e for e in world.observer.events if e.kind == "drafter_salvaged"]
    assert len(told) == 1 and "what a trainer holds" in told[0].message
    assert max(d.instance.state["trained"] for d in world.drafters if d.instance.state) > max(held) > 0
