"""The drafter learns from the states that the rollout servers kept (drafter.states: engine)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from services.config.schema import ClusterConfig
from services.core.errors import BatchError, ServiceLostError
from services.core.types import HiddenStateChunk
from tests.services.coordinator.fakes import FakeDrafter, FakeRollout
from tests.services.coordinator.test_chaos import Chaos
from tests.services.coordinator.test_turns import with_engine_states
from tests.services.coordinator.world import SGLANG, World, tiny_config


def engine_config(**changes: Any) -> ClusterConfig:
    return tiny_config(rollout={"engine": SGLANG}, drafter={"states": "engine"}, placement={"mode": "local"}, **changes)


class Trainer(FakeDrafter):
    """Remembers whose states it got."""

    def add_chunk(self, chunk: HiddenStateChunk, tensors: Any) -> None:
        super().add_chunk(chunk, tensors)
        self.seen = [*getattr(self, "seen", []), chunk]


def world_of(**changes: Any) -> World:
    world = World(engine_config(**changes))
    for i, drafter in enumerate(world.drafters):
        drafter.instance = Trainer(i, world.clock)
    return world


def test_the_servers_states_reach_every_trainer_and_the_policys_do_not() -> None:
    world = world_of()
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and summary["drafter_version"] > 0
    for drafter in world.drafters:
        seen = drafter.instance.seen
        assert [c.step for c in seen] == [1, 1, 2, 2, 3, 3]
        assert [c.policy_version for c in seen] == [0, 0, 1, 1, 2, 2]
        for step in (1, 2, 3):
            assert sum(c.num_sequences for c in seen if c.step == step) == 24, "every rollout of the step, no other"
    assert not [e for e in world.observer.events if e.kind == "states_dropped"]
    assert world.observer.steps[-1].acceptance_length_live_offline > 1.0


def test_the_tail_trains_on_this_steps_early_responses() -> None:
    """With the policy's states the first tail has nothing to learn from. A server that runs dry has."""
    world = world_of()
    chunks: list[tuple[float, int]] = []
    for drafter in world.drafters:
        add = drafter.instance.add_chunk

        def noted(chunk: HiddenStateChunk, tensors: Any, add: Any = add) -> None:
            chunks.append((world.clock(), chunk.step))
            add(chunk, tensors)

        drafter.instance.add_chunk = noted
    world.coordinator.run()
    first = world.observer.steps[0]
    assert first.drafter_micro_steps > 0 and first.drafting_s > 0
    ends = {m.step: m.at_s for m in world.observer.steps}
    rollout = {s.label: s.end_s for s in world.observer.spans if s.role == "draining"}
    early = [at for at, step in chunks if at < rollout[f"step {step}"]]
    assert early and all(at <= ends[step] for at, step in chunks)


@pytest.mark.parametrize(
    ("world", "wanted"),
    [(world_of, "train verdict answer"), (with_engine_states, "train verdict answer"), (World, "train answer verdict")],
)
def test_the_drafter_is_judged_while_the_policy_trains(world: Any, wanted: str) -> None:
    """If its states are the servers', nobody needs the policy for the verdict, and rollouts need not wait for it
    afterwards."""
    built, order, reports = world(), list[str](), list[Any]()
    coordinator = built.coordinator
    releases, policy = coordinator._releases, coordinator._services.policy
    estimate, train_step, ask = releases.estimate, policy.train_step, coordinator._ask_policy

    def train(batch: Any) -> Any:
        order.append("train")
        answers = train_step(batch)
        reports.append(answers[0])
        return answers

    def judge(live: Any) -> None:
        order.append("verdict")
        estimate(live)

    def answered(pending: Any) -> Any:
        if pending in reports:
            order.append("answer")
        return ask(pending)

    releases.estimate, policy.train_step, coordinator._ask_policy = judge, train, answered
    coordinator.run()
    assert " ".join(order) == " ".join([wanted] * 3)
    assert all(m.acceptance_length_live_offline is not None for m in built.observer.steps[1:])


def test_what_is_better_is_exported_before_anybody_waits_for_it() -> None:
    """While the policy trains or publishes, which takes longer than an answer of a fake; once for each version."""
    built, order = with_engine_states(), list[str]()
    coordinator = built.coordinator
    publish, ask = coordinator.publish_drafter, coordinator._ask_policy

    def slowly(pending: Any) -> Any:
        for _ in range(8):
            coordinator._calls.turn(0.01)
        return ask(pending)

    def published() -> None:
        order.append("publish")
        publish()

    class Exporting(FakeDrafter):
        def export(self, state: Any) -> Any:
            order.append("export")
            return super().export(state)

    for i, drafter in enumerate(built.drafters):
        drafter.instance = Exporting(i, built.clock)
    coordinator.publish_drafter, coordinator._ask_policy = published, slowly
    coordinator.run()
    versions = [m.drafter_version for m in built.observer.steps]
    assert versions[-1] > 0
    wanted = ["publish", "export"]  # the first version, which is given
    for before, after in pairwise([0, *versions]):
        wanted += ["export"] * (after - before) + ["publish"]
    assert order == wanted


def test_another_trainer_exports_when_one_is_lost_over_it() -> None:
    class Dying(FakeDrafter):
        def export(self, state: Any) -> Any:
            if state["trained"]:
                world.drafters[0].kill()
                raise ServiceLostError("drafter-0", "killed")
            return super().export(state)

    world = world_of()
    world.drafters[0].instance = Dying(0, world.clock)
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and summary["drafter_version"] >= 1
    assert [e.subject for e in world.observer.events if e.kind == "drafter_lost"] == ["drafter-0"]


def test_only_work_of_a_step_asks_for_states() -> None:
    world = world_of()
    world.coordinator.run()
    asked = [a for s in world.servers for a in s.instance.asked]
    assert {keep for group, keep in asked if group.startswith("step")} == {True}
    assert {keep for group, keep in asked if group.startswith("heldout")} == {False}
    plain = World()
    plain.coordinator.run()
    assert not any(keep for s in plain.servers for _, keep in s.instance.asked)


def test_a_server_without_states_sends_no_chunk() -> None:
    class Empty(FakeRollout):
        def take_states(self, step: int, epoch: int) -> Any:
            return HiddenStateChunk(0, step, 0, 0, 0), "nothing"

    world = world_of()
    world.servers[0].instance = Empty(0, world.clock, 12)
    world.coordinator.run()
    assert [c.step for c in world.drafters[0].instance.seen] == [1, 2, 3]


def test_states_that_are_missing_are_told() -> None:
    class Small(FakeRollout):
        def take_states(self, step: int, epoch: int) -> Any:
            chunk, blob = super().take_states(step, epoch)
            if not chunk.num_sequences:
                return chunk, blob
            return replace(chunk, num_missing=5, lost_bytes=4096 * (step == 2)), blob

    world = world_of()
    world.servers[1].instance = Small(1, world.clock, 12)
    world.coordinator.run()
    told = [e for e in world.observer.events if e.kind == "states_dropped"]
    assert [e.subject for e in told] == ["rollout-1"] * 3
    assert told[0].message == "hidden states of 5 rollouts are missing or cut short"
    assert told[1].message.endswith("4096 bytes found no room, raise rollout.engine.capture_bytes")


def test_a_server_killed_while_its_states_are_taken_is_lost_and_returns() -> None:
    class Dying(FakeRollout):
        def take_states(self, step: int, epoch: int) -> Any:
            if step == 2:
                world.servers[1].kill()
                raise ServiceLostError("rollout-1", "killed")
            return super().take_states(step, epoch)

    world = world_of()
    world.servers[1].instance = Dying(1, world.clock, 12)
    world.observer.watch = lambda view: world.servers[1].restart() if world.servers[1].instance is None else None
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and summary["rollouts"] == 72
    kinds = [e.kind for e in world.observer.events]
    assert kinds.index("slot_lost") < kinds.index("slot_returned")
    steps = [c.step for c in world.drafters[0].instance.seen]
    assert steps.count(2) == 1 and steps.count(1) == 2 and 3 in steps


def test_a_server_that_stays_silent_about_its_states_holds_nobody_up() -> None:
    world = world_of()
    silent = world.servers[0]
    execute = silent.execute_next

    def stuck() -> bool:
        head = silent._queue[0].what if silent._queue else ""
        return False if head == "rollout-0.take_states" else execute()

    silent.execute_next = stuck  # type: ignore[method-assign]
    world.observer.watch = lambda view: silent.restart() if silent.instance is None else None
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and summary["rollouts"] == 72
    (first, *_) = [e for e in world.observer.events if e.kind == "slot_lost"]
    assert first.subject == "rollout-0" and "no answer to rollout-0.take_states within 20 s" in first.message


def test_misaligned_states_end_the_run() -> None:
    class Shifted(FakeRollout):
        def take_states(self, step: int, epoch: int) -> Any:
            raise BatchError("hidden states belong to other tokens than were emitted")

    world = world_of()
    world.servers[0].instance = Shifted(0, world.clock, 12)
    with pytest.raises(BatchError, match="other tokens"):
        world.coordinator.run()
    assert world.observer.summaries[0]["status"] == "failed"


@pytest.mark.parametrize("seed", range(8))
def test_whoever_dies_every_rollout_of_a_step_asks_for_its_states(seed: int) -> None:
    world = World(engine_config(run={"steps": 4, "eval_prompts": 4}))
    chaos = Chaos(world, seed, kill_chance=0.05)
    summary = world.coordinator.run()
    assert chaos.kills and summary["status"] == "finished" and summary["rollouts"] == 96
    asked = [a for s in world.servers if s.instance is not None for a in s.instance.asked]
    assert all(keep == group.startswith("step") for group, keep in asked)
