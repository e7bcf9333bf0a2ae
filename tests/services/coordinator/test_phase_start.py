"""Many servers begin a phase: those that began first are not left without answers until the last one has work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deploy.inprocess import LocalRolloutClient
from services.coordinator.rollout_phase import GIVEN_AT_ONCE
from services.core.types import GroupWork
from tests.services.coordinator.world import World, tiny_config

SERVERS = 3 * GIVEN_AT_ONCE + 1


def test_looks_at_answers_come_between_the_orders() -> None:
    rollout = {**tiny_config().rollout.model_dump(), "num_servers": SERVERS, "prompts_per_step": 2 * SERVERS}
    world = World(tiny_config(rollout=rollout, run={"steps": 1, "eval_prompts": 0}), 2 * SERVERS)
    given: list[str] = []  # servers that got work; "" is a look

    class Client(LocalRolloutClient):
        def submit(self, work: Sequence[GroupWork], epoch: int) -> Any:
            given.append(self.name)
            assert len(work) == 2, "all that a server gets comes in one call"
            return super().submit(work, epoch)

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
