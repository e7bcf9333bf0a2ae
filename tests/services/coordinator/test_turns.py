"""A policy on the slots' GPUs. The fakes complain when both sides have their memory, or work without it, and when a
drafter trains in the policy's turn."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.errors import GpuMemoryError, StaleEpochError
from services.core.types import RunEvent
from tests.services.coordinator.test_chaos import Chaos
from tests.services.coordinator.world import SGLANG, CoordinatorKilled, World, tiny_config

COLOCATED: dict[str, Any] = {"placement": {"policy": "colocated"}}
STEPS = 3


def colocated(**changes: Any) -> World:
    return World(tiny_config(**COLOCATED, **changes))


def with_engine_states(**changes: Any) -> World:
    """Policy and servers in turns, the drafter's states from the servers."""
    rollout = {"engine": {**SGLANG, "release_memory": True}}
    placement = {"policy": "colocated", "gpus_per_slot": 0.6, "policy_gpus": 0.4}
    return World(tiny_config(rollout=rollout, drafter={"states": "engine"}, placement=placement, **changes))


def resident(**changes: Any) -> World:
    """Both sides keep their memory."""
    return World(tiny_config(placement={"policy": "colocated", "resident": True}, **changes))


def resident_with_engine_states(**changes: Any) -> World:
    placement = {"policy": "colocated", "resident": True, "gpus_per_slot": 0.6, "policy_gpus": 0.4}
    return World(tiny_config(rollout={"engine": SGLANG}, drafter={"states": "engine"}, placement=placement, **changes))


def responses(world: World) -> list[Any]:
    return [[r.response_ids for r in g.rollouts] for step in sorted(world.observer.groups)
            for g in world.observer.groups[step]]  # fmt: skip


def test_slots_are_the_policys_once_a_step_and_nobody_elses_meanwhile() -> None:
    world = colocated()
    assert world.coordinator.run()["status"] == "finished"
    for slot in ("slot 0", "slot 1"):
        turns = [s for s in world.observer.spans if (s.slot, s.role) == (slot, "policy")]
        assert len(turns) == STEPS
        assert all(t.end_s - t.start_s >= 0.5 for t in turns), "the step is trained within"
    assert all([s.released for s in server.instance.switches] == [True, False] * STEPS for server in world.servers)
    assert world.policy.instance.released, "the servers have the last turn"


@pytest.mark.parametrize("make", [resident, resident_with_engine_states])
def test_where_both_fit_turns_move_no_memory(make: Any) -> None:
    world, split = make(), World()
    assert world.coordinator.run()["status"] == "finished"
    split.coordinator.run()
    assert responses(world) == responses(split)
    for slot in ("slot 0", "slot 1"):
        turns = [s for s in world.observer.spans if (s.slot, s.role) == (slot, "policy")]
        assert len(turns) == STEPS and all(t.end_s - t.start_s >= 0.5 for t in turns)
    assert not any(server.instance.switches for server in world.servers)
    assert not world.policy.instance.released
    assert sum(d.instance.micro_steps_done for d in world.drafters) > 0
    for drafter in world.drafters:
        assert sorted(set(drafter.instance.chunks)) == [*range(1, STEPS + 1)]


def test_a_split_policy_asks_nobody_for_memory() -> None:
    world = World()
    world.coordinator.run()
    assert not any(server.instance.switches for server in world.servers)
    assert {s.role for s in world.observer.spans if s.slot.startswith("slot")}.isdisjoint({"policy"})


def test_the_run_learns_from_the_same_rollouts_as_a_split_one() -> None:
    shared, split = colocated(), World()
    shared.coordinator.run()
    split.coordinator.run()
    assert responses(shared) == responses(split)
    batches = [w.policy.instance.batches for w in (shared, split)]
    assert [b.advantages for b in batches[0]] == [b.advantages for b in batches[1]]


@pytest.mark.parametrize("dead_s", [0.0, 3.0])
def test_a_server_that_dies_while_released_is_replaced_and_not_resumed_twice(dead_s: float) -> None:
    world = colocated()
    killed: list[float] = []

    def kill() -> None:
        if len(world.policy.instance.batches) != 1 or killed:
            return
        killed.append(world.clock())
        world.servers[1].kill()
        if not dead_s:
            world.servers[1].restart()

    def bring_back(event: RunEvent) -> None:
        remember(event)
        if event.kind == "slot_lost" and world.servers[1].instance is None:
            world.clock.now += dead_s
            world.servers[1].restart()

    remember, world.policy.instance.before_step = world.observer.event, kill
    world.observer.event = bring_back  # type: ignore[method-assign]
    assert world.coordinator.run()["status"] == "finished"
    assert killed
    kinds = {e.kind for e in world.observer.events if e.subject == "rollout-1"}
    assert "slot_returned" in kinds if dead_s else "server_restarted" in kinds
    assert [s.released for s in world.servers[1].instance.switches] == [True, False], "what it began with is its own"
    assert all(len(g.rollouts) == 4 for groups in world.observer.groups.values() for g in groups)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("make", [colocated, with_engine_states, resident_with_engine_states])
def test_whoever_dies_both_sides_never_have_their_memory(make: Any, seed: int) -> None:
    world = make(run={"steps": 4, "eval_prompts": 4})
    chaos = Chaos(world, seed, kill_chance=0.05)
    assert world.coordinator.run()["status"] == "finished"
    assert chaos.kills
    for groups in world.observer.groups.values():
        ids = [r.rollout_id for g in groups for r in g.rollouts]
        assert len(ids) == len(set(ids)) == 6 * 4


def test_a_coordinator_that_takes_over_in_the_policys_turn_gives_it_back() -> None:
    world = colocated()
    died: list[int] = []

    def die() -> None:
        if len(world.policy.instance.batches) == 1 and not died:
            died.append(1)
            raise CoordinatorKilled

    world.policy.instance.before_step = die
    assert world.run_with_takeovers()["status"] == "finished"
    assert died and world.policy.instance.released
    assert not any(server.instance.released for server in world.servers)


def test_a_step_longer_than_a_lease_loses_no_slot() -> None:
    world = colocated(coordinator={"lease_s": 2.0})
    world.policy.instance.step_s = 7.0
    assert world.coordinator.run()["status"] == "finished"
    assert not [e for e in world.observer.events if e.kind == "slot_lost"]


def test_a_policy_that_finds_no_room_ends_the_run_with_its_remedy() -> None:
    world = colocated()

    def refuse(release: bool) -> None:
        if not release:
            raise GpuMemoryError("lower rollout.engine.mem_fraction")

    world.policy.instance.switch_memory = refuse
    with pytest.raises(GpuMemoryError, match="mem_fraction"):
        world.coordinator.run()
    assert world.observer.summaries[-1]["status"] == "failed"


def test_servers_that_fell_silent_are_named_where_the_policy_finds_no_room() -> None:
    """Their processes are there, as far as anybody knows, and so is what they held."""
    world = colocated(coordinator={"call_timeout_s": 5.0})

    def refuse(release: bool) -> None:
        if not release:
            raise GpuMemoryError("no room")

    def silence(view: Any) -> None:
        if view.phase == "policy" and world.servers[1].instance is not None:
            world.servers[1].kill()

    world.policy.instance.switch_memory = refuse
    world.observer.watch = silence
    with pytest.raises(GpuMemoryError, match=r"no room; servers that fell silent .* of the lost slots 1$"):
        world.coordinator.run()


def test_drafters_train_in_the_servers_turns_alone() -> None:
    """Also those that are in the middle of a micro-step when the last response is there: here they answer last then."""
    world = colocated(drafter={"training": {"when": "always"}}, run={"steps": 6, "eval_prompts": 4})
    fair, others = world.host._run_one, [s for s in world.host.services if s not in world.drafters]
    late: list[int] = []

    def run_one() -> bool:
        if world.coordinator.latest().phase not in ("reward", "policy"):
            return fair()
        late.append(sum(len(d.queued) for d in world.drafters))
        return any(s.execute_next() for s in [*others, *world.drafters])

    world.host._run_one = run_one  # type: ignore[method-assign]
    world.coordinator.run()
    assert any(late) and sum(d.instance.micro_steps_done for d in world.drafters) > 0
    for slot in ("slot 0", "slot 1"):
        mine = [s for s in world.observer.spans if s.slot == slot]
        turns, trained = ([s for s in mine if s.role == role] for role in ("policy", "drafting"))
        assert turns and all(t.end_s <= p.start_s or t.start_s >= p.end_s for t in trained for p in turns)


def test_states_are_taken_in_the_policys_turn_and_every_one_is() -> None:
    """The servers have nothing to do then, and nobody waits for what lies in host memory."""
    world = with_engine_states()
    taken: list[tuple[bool, int]] = []
    for server in world.servers:
        take = server.instance.take_states

        def noted(step: int, epoch: int, take: Any = take, server: Any = server.instance) -> Any:
            chunk, blob = take(step, epoch)
            taken.append((server.released, chunk.num_sequences))
            return chunk, blob

        server.instance.take_states = noted
    assert world.coordinator.run()["drafter_version"] > 0
    assert sum(count for _, count in taken) == STEPS * 24, "every rollout of each step, once"
    assert any(count for released, count in taken if released)
    assert all(released for released, _ in taken[-2:]), "of the last phase, both"
    for drafter in world.drafters:
        assert sorted(set(drafter.instance.chunks)) == [*range(1, STEPS + 1)]
    for step in world.observer.steps:
        assert step.acceptance_length_live_offline is not None


def test_states_of_a_server_that_dies_in_the_policys_turn_are_lost_with_it() -> None:
    world = with_engine_states()
    killed: list[int] = []
    take = world.servers[1].instance.take_states

    def die(step: int, epoch: int) -> Any:
        server = world.servers[1].instance
        if server.released and not killed:
            killed.append(step)
            world.servers[1].kill()
            world.servers[1].restart()
            raise StaleEpochError("another process")
        return take(step, epoch)

    world.servers[1].instance.take_states = die
    assert world.coordinator.run()["status"] == "finished"
    assert killed and len(world.observer.steps) == STEPS
    assert all(len(g.rollouts) == 4 for groups in world.observer.groups.values() for g in groups)
