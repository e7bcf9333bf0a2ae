"""Many servers begin a phase: those that began first are not left without answers until the last one has work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deploy.inprocess import LocalRolloutClient
from services.coordinator import scheduler
from services.coordinator.rollout_phase import GIVEN_AT_ONCE
from services.core.types import GroupWork
from tests.services.coordinator.world import World, tiny_config

SERVERS = 3 * GIVEN_AT_ONCE + 1


def crowd() -> World:
    """Two groups for each server."""
    rollout = {**tiny_config().rollout.model_dump(), "num_servers": SERVERS, "prompts_per_step": 2 * SERVERS}
    return World(tiny_config(rollout=rollout, run={"steps": 1, "eval_prompts": 0}), 2 * SERVERS)


def test_looks_at_answers_come_between_the_orders() -> None:
    world = crowd()
    given: list[str] = []  # servers that got work; "" is a look

    class Client(LocalRolloutClient):
        def submit_and_advance(self, work: Sequence[GroupWork], budget_s: float, epoch: int) -> Any:
            given.append(self.name)
            assert len(work) == 2, "all that a server gets comes in one call"
            return super().submit_and_advance(work, budget_s, epoch)

    class Waiter:
        def wait(self, pending: Sequence[Any], timeout_s: float) -> list[Any]:
            given.append("")
            return world.host.wait(pending, timeout_s)

    clients = [Client(server) for server in world.servers]
    world.services = replace(world.services, rollout=clients)
    world.replace_services(waiter=Waiter())
    assert world.coordinator.run()["status"] == "finished"
    first, last = given.index("rollout-0"), max(i for i, name in enumerate(given) if name)
    between = "".join(name[:1] or " " for name in given[first : last + 1])
    assert between == " ".join(["r" * GIVEN_AT_ONCE] * 3 + ["r"])


def test_who_gets_what_is_decided_once_for_all_that_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a look at each slot and group: anew for each few servers, a thousand would begin half a minute late."""
    world, sizes = crowd(), list[int]()
    hand_out = scheduler.hand_out

    def counted(pending: Sequence[GroupWork], *rest: Any) -> Any:
        sizes.append(len(pending))
        return hand_out(pending, *rest)

    monkeypatch.setattr(scheduler, "hand_out", counted)
    assert world.coordinator.run()["status"] == "finished"
    assert sizes == [2 * SERVERS]


def test_work_of_a_server_that_is_lost_before_it_gets_it_goes_to_others() -> None:
    world, lost = crowd(), f"rollout-{SERVERS - 1}"
    given: list[tuple[str, int]] = []

    class Client(LocalRolloutClient):
        def submit_and_advance(self, work: Sequence[GroupWork], budget_s: float, epoch: int) -> Any:
            if not given:
                world.coordinator._fleet.lose(SERVERS - 1, "a test takes it")
            given.append((self.name, sum(len(w.indices) for w in work)))
            return super().submit_and_advance(work, budget_s, epoch)

        def submit(self, work: Sequence[GroupWork], epoch: int) -> Any:
            given.append((self.name, sum(len(w.indices) for w in work)))
            return super().submit(work, epoch)

    world.services = replace(world.services, rollout=[Client(server) for server in world.servers])
    world.replace_services(waiter=world.host)
    assert world.coordinator.run()["status"] == "finished"
    assert lost not in [name for name, _ in given[:SERVERS]]
    assert sum(count for _, count in given) == 2 * SERVERS * world.config.rollout.group_size
