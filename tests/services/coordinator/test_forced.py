"""What servers are forced to use: told once, and again whenever they may not know it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.inprocess import LocalRolloutClient
from services.coordinator.control import ControlRequest
from tests.services.coordinator.world import World, tiny_config


def told_strategies(world: World) -> dict[str, list[str | None]]:
    """By server, as they are sent from here on."""
    told: defaultdict[str, list[str | None]] = defaultdict(list)

    class Client(LocalRolloutClient):
        def set_strategy(self, name: str | None, epoch: int) -> Any:
            told[self.name].append(name)
            return super().set_strategy(name, epoch)

    world.services = replace(world.services, rollout=[Client(server) for server in world.servers])
    world.replace_services(waiter=world.host)
    return told


def when(world: World, *acts: tuple[int, str, Callable[[], Any]]) -> None:
    """Do each once, when the run is in that phase of that step; in a rollout phase while something runs."""
    left = list(acts)

    def watch(view: Any) -> None:
        for act in list(left):
            step, phase, do = act
            if (view.step, view.phase) == (step, phase) and (view.rollouts_running or phase != "rollout"):
                left.remove(act)
                do()

    world.observer.watch = watch


def force(world: World, name: str | None) -> Callable[[], Any]:
    return lambda: world.coordinator.control.ask(ControlRequest("selector", name))


def test_a_server_is_told_once_and_again_when_it_changes() -> None:
    world = World(tiny_config(run={"steps": 5, "eval_prompts": 0}))
    told = told_strategies(world)
    when(world, (2, "reward", force(world, "off")), (4, "reward", force(world, None)))
    assert world.coordinator.run()["status"] == "finished"
    assert dict(told) == {"rollout-0": [None, "off", None], "rollout-1": [None, "off", None]}


@pytest.mark.parametrize("phase", ["rollout", "policy"])
def test_a_server_that_was_restarted_is_told_again(phase: str) -> None:
    """In a rollout phase that is a loss; between two of them nobody notices before it says what it serves."""
    world = World(tiny_config(run={"steps": 4, "eval_prompts": 0}))
    told = told_strategies(world)

    def die() -> None:
        assert world.servers[1].instance.strategy == "off"
        world.servers[1].kill()
        world.servers[1].restart()

    when(world, (1, "reward", force(world, "off")), (2, phase, die))
    assert world.coordinator.run()["status"] == "finished"
    assert dict(told) == {"rollout-0": [None, "off"], "rollout-1": [None, "off", "off"]}
    assert [server.instance.strategy for server in world.servers] == ["off", "off"]


def test_a_server_that_was_out_of_reach_is_told_again() -> None:
    """It may have missed an order, or have got one whose answer was lost."""
    world = World(tiny_config(run={"steps": 4, "eval_prompts": 0}))
    told = told_strategies(world)
    lose = lambda: world.coordinator._fleet.lose(1, "a test cuts its cable")  # noqa: E731
    when(world, (1, "reward", force(world, "off")), (2, "rollout", lose))
    assert world.coordinator.run()["status"] == "finished"
    assert dict(told) == {"rollout-0": [None, "off"], "rollout-1": [None, "off", "off"]}
