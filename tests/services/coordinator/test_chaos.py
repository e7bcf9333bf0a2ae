"""Services die at random moments: every prompt still has exactly group_size rollouts, none twice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.core.errors import ServiceLostError
from tests.services.coordinator.world import World, tiny_config


class Chaos:
    """Before some waits, kills a random service, and restarts dead ones some simulated time later."""

    def __init__(self, world: World, seed: int, kill_chance: float, also_reward: bool = True) -> None:
        self._world, self._rng, self._chance = world, random.Random(seed), kill_chance
        self._victims = [*world.servers, *world.drafters, *([world.reward] if also_reward else [])]
        self._dead_until: dict[str, float] = {}
        self.kills: list[str] = []
        self._wait = world.host.wait
        world.host.wait = self.wait  # type: ignore[method-assign]

    def wait(self, pending: Any, timeout_s: float) -> Any:
        now = self._world.clock()
        for victim in self._victims:
            until = self._dead_until.get(victim.name)
            if until is not None and now >= until:
                del self._dead_until[victim.name]
                victim.restart()
        if self._rng.random() < self._chance:
            victim = self._rng.choice(self._victims)
            if victim.name not in self._dead_until:
                self.kills.append(victim.name)
                self._dead_until[victim.name] = now + self._rng.uniform(0.05, 2.0)
                victim.kill()
        return self._wait(pending, min(timeout_s, 0.5))


@pytest.mark.parametrize("seed", range(25))
def test_no_rollout_is_missing_or_doubled_whoever_dies(seed: int) -> None:
    world = World(tiny_config(run={"steps": 4, "eval_prompts": 4, "compare_prompts": 2, "compare_repeats": 1}))
    chaos = Chaos(world, seed, kill_chance=0.05)
    summary = world.coordinator.run()

    assert chaos.kills and summary["status"] == "finished"
    prompts = world.coordinator.prompts
    for step in range(1, 5):
        groups = world.observer.groups[step]
        assert [g.prompt.id for g in groups] == [p.id for p in prompts(step)]
        ids = [r.rollout_id for g in groups for r in g.rollouts]
        assert len(ids) == len(set(ids)) == 6 * 4
        assert all([r.index for r in g.rollouts] == [0, 1, 2, 3] for g in groups)
    assert world.observer.events
    assert summary["greedy_mismatches"] == 0


def test_a_rerun_after_kills_draws_the_same_rollouts() -> None:
    """Re-dispatch keeps the seeds: what was generated does not depend on who died."""
    calm, rough = World(), World()
    Chaos(rough, 3, kill_chance=0.1)
    calm.coordinator.run()
    rough.coordinator.run()
    for step, groups in calm.observer.groups.items():
        again = rough.observer.groups[step]
        assert [[r.response_ids for r in g.rollouts] for g in groups] == [
            [r.response_ids for r in g.rollouts] for g in again
        ]


def test_a_killed_server_is_told_returns_and_is_loaded_before_it_works() -> None:
    world = World()
    killed: list[float] = []

    def watch(view: Any) -> None:
        victim = world.servers[1]
        if view.phase == "rollout" and view.step == 2 and view.rollouts_running and not killed:
            killed.append(world.clock())
            victim.kill()
        if killed and victim.instance is None and world.clock() > killed[0] + 0.5:
            victim.restart()

    world.observer.watch = watch
    summary = world.coordinator.run()
    kinds = [e.kind for e in world.observer.events]
    assert kinds.index("slot_lost") < kinds.index("slot_returned")
    assert any(s.role == "lost" and s.slot == "slot 1" for s in world.observer.spans)
    assert summary["rollouts"] == 72
    # FakeRollout refuses work before weights, so the new process was loaded; it took part again.
    assert world.servers[1].instance.served > 0 and world.servers[1].instance.policy == 3


def test_drafter_training_resumes_from_the_last_snapshot() -> None:
    world = World(tiny_config(run={"steps": 6, "eval_prompts": 0}))
    killed: list[int] = []

    def kill_after_step(metrics: Any) -> None:
        if metrics.step == 3:
            victim = next(d for d in world.drafters if d.instance.state)
            killed.append(max(d.instance.state["trained"] for d in world.drafters if d.instance.state))
            victim.kill()
            victim.restart()

    world.observer.step = kill_after_step  # type: ignore[method-assign]
    world.coordinator.run()
    assert any(e.kind == "drafter_lost" for e in world.observer.events)
    assert max(d.instance.state["trained"] for d in world.drafters if d.instance.state) > killed[0] > 0
    for drafter in world.drafters:
        assert len(drafter.instance.chunks) >= 5, "a restarted trainer gets the kept hidden states again"


def test_a_drafter_that_dies_while_it_holds_the_slot_loses_the_slot_and_the_run_goes_on() -> None:
    world = World()
    killed: list[str] = []

    def watch(view: Any) -> None:
        for slot, state in view.slots.items():
            if state == "drafting" and not killed:
                killed.append(slot)
                world.drafters[int(slot.split()[1])].kill()

    world.observer.watch = watch
    summary = world.coordinator.run()
    assert killed and summary["status"] == "finished"
    kinds = [e.kind for e in world.observer.events]
    assert "drafter_lost" in kinds and "slot_lost" in kinds and "slot_returned" in kinds


def test_when_no_server_is_left_the_run_ends_with_a_clear_error() -> None:
    world = World()

    def kill_all(metrics: Any) -> None:
        for server in world.servers:
            server.kill()

    world.observer.step = kill_all  # type: ignore[method-assign]
    with pytest.raises(ServiceLostError, match="no rollout server is left"):
        world.coordinator.run()
    assert world.observer.summaries[0]["status"] == "failed"


def test_a_silent_server_is_lost_when_its_lease_runs_out() -> None:
    world = World()
    silent = world.servers[0]
    hang: list[bool] = []
    execute = silent.execute_next
    silent.execute_next = lambda: False if hang else execute()  # type: ignore[method-assign]
    world.observer.step = lambda metrics: hang.append(True) if metrics.step == 1 else None  # type: ignore[method-assign]
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and summary["rollouts"] == 72
    (event,) = [e for e in world.observer.events if e.kind == "slot_lost"]
    assert event.subject == "rollout-0" and ("lease ran out" in event.message or "no answer" in event.message)
