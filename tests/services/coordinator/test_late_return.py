"""A machine that is away for longer than anybody waits is still taken back."""

from __future__ import annotations

from typing import Any

from tests.services.coordinator.world import World, tiny_config


def test_a_server_and_its_trainer_that_were_given_up_work_again_when_they_return() -> None:
    world = World(tiny_config(run={"steps": 40, "eval_prompts": 0}, coordinator={"start_timeout_s": 3.0}))
    server, trainer = world.servers[1], world.drafters[1]

    def watch(view: Any) -> None:
        if view.step == 2 and view.phase == "rollout" and view.rollouts_running:
            server.kill()
            trainer.kill()
        if view.step == 25 and server.instance is None:
            told = [e.kind for e in world.observer.events]
            assert told.count("server_gone") == 1 and told.count("drafter_gone") == 1
            server.restart()
            trainer.restart()

    world.observer.watch = watch
    assert world.coordinator.run()["status"] == "finished"
    kinds = [(e.kind, e.subject) for e in world.observer.events]
    assert kinds.index(("server_gone", "rollout-1")) < kinds.index(("slot_returned", "rollout-1"))
    assert kinds.index(("drafter_gone", "drafter-1")) < kinds.index(("drafter_returned", "drafter-1"))
    assert any(r.server == "rollout-1" for g in world.observer.groups[40] for r in g.rollouts)
