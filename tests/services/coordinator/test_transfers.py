"""Policies that did not come over a direct connection: told, sent another way, and never a reason to wait for ever."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.errors import ServiceLostError, TransferError
from services.core.types import ServedVersions
from tests.services.coordinator.fakes import FakeRollout
from tests.services.coordinator.world import World


class Disconnected(FakeRollout):
    """Every second load of a policy fails: the offer does, the copy comes."""

    failures = 0
    torn = False
    on_failure = staticmethod(lambda: None)
    always = False

    def load_policy(self, version: int, tensors: Any, epoch: int) -> ServedVersions:
        self._check(epoch)
        self.failures += 1
        if self.failures % 2 or self.always:
            self.policy = -1 if self.torn else self.policy
            self.on_failure()
            raise TransferError("the other side closed the connection")
        return super().load_policy(version, tensors, epoch)


def disconnect(world: World, slot: int = 1) -> Disconnected:
    server = Disconnected(slot, world.clock, 12)
    world.servers[slot].instance = server
    return server


def kinds(world: World) -> list[str]:
    return [e.kind for e in world.observer.events]


@pytest.mark.parametrize("torn", [False, True])
def test_a_failed_transfer_is_told_and_the_server_gets_a_copy(torn: bool) -> None:
    world = World()
    server = disconnect(world)
    server.torn = torn
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and summary["policy_version"] == 3
    told = [e for e in world.observer.events if e.kind == "transfer_failed"]
    assert [e.subject for e in told] == ["rollout-1"] * 4  # versions 0 to 3: each tries again
    assert (
        "the other side closed the connection; the policy goes to rollout-1 through the object store" in told[0].message
    )
    assert world.policy.instance.copies == [0, 1, 2, 3]
    assert "slot_lost" not in kinds(world) and "version_mismatch" not in kinds(world)
    assert all(s.instance._versions() == world.coordinator._fleet.expected for s in world.servers)
    assert all({r.server for g in groups for r in g.rollouts} == {"rollout-0", "rollout-1"}
               for groups in world.observer.groups.values())  # fmt: skip


def test_every_server_may_be_cut_off() -> None:
    world = World()
    for slot in (0, 1):
        disconnect(world, slot)
    assert world.coordinator.run()["status"] == "finished"
    assert kinds(world).count("transfer_failed") == 8


def test_a_policy_trainer_that_died_meanwhile_ends_the_run_and_is_named() -> None:
    world = World()
    disconnect(world).on_failure = world.policy.kill  # type: ignore[assignment]
    with pytest.raises(ServiceLostError, match=r"policy is lost: .*the last checkpoint died with it") as caught:
        world.coordinator.run()
    assert caught.value.name == "policy" and "policy_lost" in kinds(world)


def test_a_server_that_dies_while_its_copy_is_made_is_lost_and_served_when_it_is_back() -> None:
    world = World()
    server = disconnect(world)

    def die() -> None:
        if server.failures == 3:
            world.servers[1].kill()
            world.servers[1].restart()

    server.on_failure = die  # type: ignore[assignment]
    assert world.coordinator.run()["status"] == "finished"
    assert world.servers[1].instance._versions() == world.coordinator._fleet.expected


def test_a_copy_that_is_superseded_costs_the_server_its_slot_only_until_it_is_back() -> None:
    world = World()
    disconnect(world)
    policy, copy_of = world.policy.instance, world.policy.instance.copy_of

    def too_late(version: int) -> Any:
        if len(policy.copies) == 1:
            policy.copies.append(version)
            raise TransferError("policy version 1 is superseded")
        return copy_of(version)

    policy.copy_of = too_late
    assert world.coordinator.run()["status"] == "finished"
    lost = [e for e in world.observer.events if e.kind == "slot_lost"]
    assert len(lost) == 1 and "superseded" in lost[0].message and "slot_returned" in kinds(world)


def test_a_server_that_takes_no_copy_either_is_lost() -> None:
    """Its second failure is a loss: it is asked again when it is back, and another server does the work meanwhile."""
    world = World()
    server = disconnect(world)
    server.always = True

    def recover() -> None:
        server.always = server.failures < 6

    server.on_failure = recover  # type: ignore[assignment]
    assert world.coordinator.run()["status"] == "finished"
    assert kinds(world).count("slot_lost") >= 2
