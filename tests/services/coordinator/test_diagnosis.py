"""What `longtail why` asks the coordinator for, on simulated time."""

from __future__ import annotations

from typing import Any

from services.coordinator.diagnosis import Diagnosis
from services.core.types import ServedVersions
from tests.services.coordinator.world import World, tiny_config


def test_a_server_that_does_not_answer_is_seen_with_call_lease_and_versions() -> None:
    world = World(tiny_config(run={"steps": 3, "eval_prompts": 0}))
    silent = world.servers[1]
    hang: list[bool] = []
    execute = silent.execute_next
    silent.execute_next = lambda: False if hang else execute()  # type: ignore[method-assign]
    seen: list[Diagnosis] = []
    wait = world.host.wait

    def watched(pending: Any, timeout_s: float) -> Any:
        """Between two looks of the coordinator, as another thread would ask."""
        seen.append(world.coordinator.diagnosis())
        if any(e.kind == "slot_lost" for e in world.observer.events):
            hang.clear()
        return wait(pending, timeout_s)

    def watch(view: Any) -> None:
        if view.step == 2 and view.phase == "rollout" and view.rollouts_running:
            hang.append(True)

    world.host.wait = watched  # type: ignore[method-assign]
    world.observer.watch = watch
    world.coordinator.run()

    held = [d for d in seen if d.step == 2 and d.phase == "rollout" and d.slots[1].state != "lost"]
    stuck = max(held, key=lambda d: d.silent_s["rollout-1"])
    assert (stuck.phase, stuck.step, stuck.num_steps) == ("rollout", 2, 3)
    call = next(c for c in stuck.asked if c.owner == "rollout-1")
    assert call.what.startswith("rollout-1.") and call.waited_s > 1.0 and call.allowed_s == 20.0
    slot = stuck.slots[1]
    assert slot.state in ("rollout", "draining") and slot.expires_s is not None and slot.expires_s < 4.0
    assert slot.served == ServedVersions(stuck.policy_version, stuck.drafter_version)


def test_nobody_holds_an_idle_slot() -> None:
    world = World()
    before = world.coordinator.diagnosis()
    assert before.asked == () and before.silent_s == {}
    assert [(s.state, s.expires_s, s.served) for s in before.slots] == [("idle", None, None)] * 2
