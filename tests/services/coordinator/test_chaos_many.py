"""Hundreds of faults of every kind in one run: it ends, every group is complete and counted once, versions only grow,
no slot is left behind. All of it on simulated time, all of it from one seed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from deploy.inprocess import LocalService
from services.core.errors import LongtailError
from services.core.types import SlotState
from tests.services.coordinator.world import CoordinatorKilled, World, tiny_config

STEPS, PROMPTS, GROUP = 24, 8, 4
REPEATED = 0.03  # of all messages


class Faults:
    """Before some waits of the coordinator, one fault: a service dies (and is restarted later), falls silent for a
    while, a server becomes slow, or the coordinator dies itself. And some messages come twice: the coordinator gets
    one of the two answers, of the policy trainer always the first."""

    def __init__(self, world: World, seed: int, chance: float) -> None:
        self._world, self._rng, self._chance = world, random.Random(seed), chance
        self._dead_until: dict[str, float] = {}
        self._silent_until: dict[str, float] = {}
        self.count: Counter[str] = Counter()
        self._wait = world.host.wait
        world.host.wait = self.wait  # type: ignore[method-assign]
        for service in (*world.servers, *world.drafters, world.reward):
            self._can_fall_silent(service)
        for service in (*world.servers, *world.drafters, world.reward, world.policy):
            self._can_repeat(service)

    def _can_fall_silent(self, service: LocalService) -> None:
        execute = service.execute_next

        def execute_next() -> bool:
            return self._world.clock() >= self._silent_until.get(service.name, 0.0) and execute()

        service.execute_next = execute_next  # type: ignore[method-assign]

    def _can_repeat(self, service: LocalService) -> None:
        execute = service.execute_next

        def execute_next() -> bool:
            if service.queued and self._rng.random() < REPEATED:
                call = service.queued[0]
                call._run = partial(self._twice, call._run, service is self._world.policy)
            return execute()

        service.execute_next = execute_next  # type: ignore[method-assign]

    def _twice(self, run: Callable[[], Any], first_only: bool) -> Any:
        answer = run()
        self.count["repeated"] += 1
        try:
            again = run()
        except LongtailError:
            return answer
        return answer if first_only or self._rng.random() < 0.5 else again

    def wait(self, pending: Any, timeout_s: float) -> Any:
        now, world = self._world.clock(), self._world
        for service in (*world.servers, *world.drafters, world.reward):
            if now >= self._dead_until.get(service.name, float("inf")):
                del self._dead_until[service.name]
                service.restart()
        if self._rng.random() < self._chance:
            self._strike(now)
        return self._wait(pending, min(timeout_s, 0.5))

    def _strike(self, now: float) -> None:
        world, rng = self._world, self._rng
        kinds: list[tuple[float, Callable[[], str]]] = [
            (3.0, lambda: self._kill(rng.choice(world.servers), now)),
            (3.0, lambda: self._kill(rng.choice(world.drafters), now)),
            (0.5, lambda: self._kill(world.reward, now)),
            (2.0, lambda: self._silence(rng.choice([*world.servers, *world.drafters]), now)),
            (2.0, self._slow),
            (0.7, self._kill_coordinator),
        ]
        (strike,) = rng.choices([k for _, k in kinds], [w for w, _ in kinds])
        self.count[strike()] += 1

    def _kill(self, victim: LocalService, now: float) -> str:
        if victim.name not in self._dead_until:
            self._dead_until[victim.name] = now + self._rng.uniform(0.05, 2.0)
            victim.kill()
        return f"kill {victim.name.split('-')[0]}"

    def _silence(self, victim: LocalService, now: float) -> str:
        # mostly a delay; now and then longer than a lease
        self._silent_until[victim.name] = now + self._rng.choice([0.3, 1.0, 3.0, 9.0])
        return "silence"

    def _slow(self) -> str:
        server = self._rng.choice(self._world.servers)
        if server.instance is not None:
            server.instance.token_s = self._rng.choice([0.002, 0.01, 0.05])
        return "slow"

    def _kill_coordinator(self) -> str:
        self.count["kill coordinator"] += 1
        raise CoordinatorKilled


@pytest.mark.parametrize("seed", range(12))
def test_a_run_survives_hundreds_of_faults(seed: int) -> None:
    rollout = {"num_servers": 4, "prompts_per_step": PROMPTS, "group_size": GROUP,
               "engine": {"type": "native", "max_running": 12, "max_len": 1024}}  # fmt: skip
    world = World(tiny_config(run={"steps": STEPS, "eval_prompts": 4}, rollout=rollout), train_prompts=40)
    world.policy.instance.no_signal_every = 5  # versions are no count of steps
    faults = Faults(world, seed, chance=0.1)
    summary = world.run_with_takeovers()

    assert sum(faults.count.values()) >= 200, faults.count
    assert {"kill rollout", "kill drafter", "silence", "slow", "kill coordinator", "repeated"} <= set(faults.count)
    assert summary["status"] == "finished" and summary["policy_version"] == STEPS - STEPS // 5
    applied = world.policy.instance.batches
    assert [b.step for b in applied] == list(range(1, STEPS + 1)), "every step was applied, and once"
    for batch in applied:
        by_group: dict[str, list[int]] = {}
        for rollout_ in batch.rollouts:
            by_group.setdefault(rollout_.group_id, []).append(rollout_.index)
        assert len(by_group) == PROMPTS and all(i == list(range(GROUP)) for i in by_group.values())
    for name in ("policy_version", "drafter_version"):
        seen = [getattr(m, name) for m in world.observer.steps]
        assert all(a <= b for a, b in itertools.pairwise(seen)), f"{name} went back"
    coordinator = world.coordinator
    states = {coordinator._leases.state(slot) for slot in range(4)}
    assert states <= {SlotState.IDLE, SlotState.LOST, SlotState.ROLLOUT}, "a slot is stuck"
    assert not coordinator._drafting.slots
    told = Counter(e.kind for e in world.observer.events)
    # one that dies while it takes over has not told so yet
    assert 0 < told["coordinator_returned"] <= faults.count["kill coordinator"]
    assert told["rollouts_missing"], "an answer with finished rollouts got lost, and was noticed"
    assert told["slot_returned"] and told["drafter_returned"] and told["drafter_published"]


def test_a_takeover_does_not_repeat_a_step_and_draws_the_same_rollouts() -> None:
    calm = World()
    calm.coordinator.run()
    for at in range(5, 400, 23):
        world, waits, wait = World(), itertools.count(), None
        wait = world.host.wait

        def dying(pending: Any, timeout_s: float, wait: Any = wait, waits: Any = waits, at: int = at) -> Any:
            if next(waits) == at:
                raise CoordinatorKilled
            return wait(pending, timeout_s)

        world.host.wait = dying  # type: ignore[method-assign]
        summary = world.run_with_takeovers()
        assert summary["status"] == "finished"
        drawn = [[(r.rollout_id, r.response_ids) for r in b.rollouts] for b in world.policy.instance.batches]
        assert drawn == [[(r.rollout_id, r.response_ids) for r in b.rollouts] for b in calm.policy.instance.batches]
        assert [e.step for e in world.observer.evaluations] == [0, 3]
