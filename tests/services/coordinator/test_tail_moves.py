"""Moves of the tail in whole runs on fakes: nothing is lost, doubled or changed, whoever dies in the middle."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from deploy.side_by_side import SideBySideHost
from services.config.schema import ClusterConfig
from services.coordinator.coordinator import Coordinator
from services.core.types import Rollout, ServerReport
from tests.services.coordinator.fakes import FakeRollout
from tests.services.coordinator.test_chaos import Chaos
from tests.services.coordinator.world import World, tiny_config


def moving_config(num_servers: int = 3, enabled: bool = True, **changes: Any) -> ClusterConfig:
    rollout = {
        "num_servers": num_servers, "group_size": 4, "prompts_per_step": 9, "advance_budget_s": 0.05,
        "engine": {"type": "native", "max_running": 12, "max_len": 1024},
        "consolidate": {"enabled": enabled, "min_freed_s": 0.1},
    }  # fmt: skip
    return tiny_config(**{"rollout": rollout, "run": {"steps": 5, "eval_prompts": 4}} | changes)


def responses(world: World) -> dict[int, list[tuple[str, tuple[int, ...]]]]:
    return {
        step: [(r.rollout_id, r.response_ids) for g in groups for r in g.rollouts]
        for step, groups in world.observer.groups.items()
    }


def events(world: World, kind: str = "tail_moved") -> list[Any]:
    return [e for e in world.observer.events if e.kind == kind]


def check_whole(world: World, steps: int = 5, per_step: int = 36) -> None:
    """Every rollout once, each the one that its seed says."""
    for step in range(1, steps + 1):
        found = responses(world)[step]
        assert len({i for i, _ in found}) == len(found) == per_step
        for group in world.observer.groups[step]:
            for r in group.rollouts:
                assert r.response_ids == tuple(r.seed % 97 + n for n in range(len(r.response_ids)))


def test_the_last_rollouts_go_on_elsewhere_and_the_slot_trains() -> None:
    still, moving = World(moving_config(enabled=False)), World(moving_config())
    still.coordinator.run()
    moving.coordinator.run()
    told = events(moving)
    assert told and not events(still)
    assert "of its last rollouts go on at rollout-" in told[0].message and told[0].subject.startswith("rollout-")
    assert not any(s.instance.withdrawn for s in still.servers)
    assert responses(moving) == responses(still), "a move changes nothing but the place"
    check_whole(moving)
    out = Counter(w for s in moving.servers for w in s.instance.withdrawn)
    assert out == Counter(w for s in moving.servers for w in s.instance.continued), "each goes on from where it was"
    assert max(Counter(i for i, _ in out.elements()).values()) == 1, "a rollout moves once at most"
    assert all(
        v.rollouts_running + v.rollouts_done <= v.rollouts_total for v in moving.observer.views if v.phase == "rollout"
    )
    trained = [s for s in moving.observer.spans if s.role == "drafting"]
    for event in told:
        slot = f"slot {event.subject.removeprefix('rollout-')}"
        assert any(s.slot == slot and s.start_s >= event.at_s - 1e-6 for s in trained), "the freed slot trains"


def test_only_what_the_drafter_wants_is_freed() -> None:
    for changes in ({"drafter": {"training": {"when": "never"}}}, {"rollout": {"consolidate": {"enabled": False}}}):
        world = World(tiny_config(**changes))
        world.coordinator.run()
        assert not any(s.instance.withdrawn for s in world.servers)
    world = World(moving_config())
    world.coordinator.run()
    moved = {i.partition("/")[0] for s in world.servers for i, _ in s.instance.withdrawn}
    assert moved and "heldout" not in moved and "step00001" not in moved, "before the first step there is no data"


class Slower(FakeRollout):
    """A token takes 2 % longer for each request beside it."""

    def advance(self, budget_s: float, epoch: int) -> ServerReport:
        self.token_s = 0.01 * (1 + 0.02 * max(0, len(self.requests) - 1))
        return super().advance(budget_s, epoch)


def side_by_side(num_servers: int, enabled: bool, steps: int = 12) -> World:
    """A run whose slots work at the same time: (rollout, free slot, drafting) seconds of it are comparable."""
    world = World(moving_config(num_servers, enabled, run={"steps": steps, "eval_prompts": 0}))
    host = SideBySideHost(world.clock)
    for service in (*world.servers, *world.drafters, world.policy, world.reward):
        host.services.append(service)
    for i, service in enumerate(world.servers):
        service.instance = Slower(i, world.clock, 12)
    world.services = replace(world.services, waiter=host)
    world.coordinator = Coordinator(world.config, world.inputs, world.services, world.observer, host.clock)
    world.coordinator.run()
    return world


@pytest.mark.parametrize("num_servers", [2, 3, 4])
def test_slots_are_freed_and_the_phase_ends_in_time(num_servers: int) -> None:
    off, on = (side_by_side(num_servers, enabled).observer for enabled in (False, True))
    assert any(e.kind == "tail_moved" for e in on.events)
    free = [sum(m.idle_s + m.drafting_s for m in o.steps) for o in (off, on)]
    seconds = [sum(m.rollout_s for m in o.steps) for o in (off, on)]
    print(f"{num_servers} servers: free slot seconds {free}, rollout seconds {seconds}")
    assert free[1] > free[0]
    assert seconds[1] <= 1.02 * seconds[0]


# -- faults in the middle of a move


class Unlucky(FakeRollout):
    """Calls `strike(what, self)` before and after what matters."""

    strike: Any = staticmethod(lambda what, server: None)

    def withdraw(self, rollout_ids: Any, epoch: int) -> Any:
        self.strike("before withdraw", self)
        found = super().withdraw(rollout_ids, epoch)
        self.strike("after withdraw", self)
        return found

    def submit(self, work: Any, epoch: int) -> None:
        begun = any(w.partials for w in work)
        super().submit(work, epoch)
        if begun:
            self.strike("after submit", self)


def unlucky_world(
    monkeypatch: pytest.MonkeyPatch, when: str, times: int = 1, others: bool = False
) -> tuple[World, list[str]]:
    """The server that is at `when` dies there, or all the others do."""
    world = World(moving_config())
    struck: list[str] = []

    def strike(what: str, server: FakeRollout) -> None:
        if what == when and len(struck) < times:
            victims = [s for s in world.servers if (s.name != f"rollout-{server.slot}") == others]
            for victim in victims:
                struck.append(victim.name)
                victim.kill()

    monkeypatch.setattr(Unlucky, "strike", staticmethod(strike))
    for i, service in enumerate(world.servers):
        service._build = lambda i=i: Unlucky(i, world.clock, 12)
        service.instance = service._build()
    wait = world.host.wait

    def reviving(pending: Any, timeout_s: float) -> Any:
        for s in world.servers:
            if s.instance is None and world.clock() > 1.0 + lost_at.setdefault(
                s.name + str(len(struck)), world.clock()
            ):
                s.restart()
        return wait(pending, min(timeout_s, 0.5))

    lost_at: dict[str, float] = {}
    world.host.wait = reviving  # type: ignore[method-assign]
    return world, struck


@pytest.mark.parametrize("others", [False, True], ids=["itself", "others"])
@pytest.mark.parametrize("when", ["before withdraw", "after withdraw", "after submit"])
def test_a_server_that_dies_in_the_middle_of_a_move_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, when: str, others: bool
) -> None:
    world, struck = unlucky_world(monkeypatch, when, others=others)
    summary = world.coordinator.run()
    assert struck and summary["status"] == "finished"
    # a server without work that is back before anybody asks it for something was only restarted
    assert events(world, "slot_lost") or events(world, "server_restarted")
    check_whole(world)


def test_what_was_withdrawn_goes_on_from_there_when_its_next_server_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator keeps the partial: nothing is generated a second time."""
    world, struck = unlucky_world(monkeypatch, "after submit")
    taken: list[tuple[str, int]] = []
    submit = Unlucky.submit

    def noted(self: Unlucky, work: Any, epoch: int) -> None:
        taken.extend((p.rollout_id, len(p.response_ids)) for w in work for p in w.partials)
        submit(self, work, epoch)

    monkeypatch.setattr(Unlucky, "submit", noted)
    world.coordinator.run()
    assert struck
    twice = [key for key, count in Counter(taken).items() if count == 2]
    assert twice, "it was submitted again, with as many tokens"
    check_whole(world)


class Muddled(FakeRollout):
    """Tells some finished rollouts again in a later report."""

    def advance(self, budget_s: float, epoch: int) -> ServerReport:
        report = super().advance(budget_s, epoch)
        again: tuple[Rollout, ...] = tuple(getattr(self, "told", ()))
        self.told = report.finished[:2]
        return ServerReport(
            (*again, *report.finished), report.running, report.waiting, report.new_tokens, report.busy_s,
            report.strategy, report.versions,
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(25))
def test_moves_deaths_and_duplicates_at_random(seed: int) -> None:
    """Servers and trainers die, withdrawals arrive twice, finished rollouts are told twice, one server is slow."""
    world = World(moving_config(num_servers=4, run={"steps": 5, "eval_prompts": 4}))
    rng = random.Random(seed)
    for i, service in enumerate(world.servers):
        service._build = lambda i=i: Muddled(i, world.clock, 12, token_s=0.02 if i == seed % 4 else 0.01)
        service.instance = service._build()
    for client in world.services.rollout:
        ask = client.withdraw

        def twice(ids: Any, epoch: int, ask: Any = ask) -> Any:
            first = ask(ids, epoch)
            if rng.random() < 0.3:
                ask(ids, epoch)
            return first

        client.withdraw = twice  # type: ignore[method-assign]
    chaos = Chaos(world, seed, kill_chance=0.02)
    summary = world.coordinator.run()
    assert summary["status"] == "finished" and chaos.kills
    check_whole(world)


def test_the_random_runs_do_move() -> None:
    moves = 0
    for seed in range(6):
        world = World(moving_config(num_servers=4))
        Chaos(world, seed, kill_chance=0.02)
        world.coordinator.run()
        moves += len(events(world))
    assert moves >= 5
