"""Core protocols over real Ray actors: errors arrive as themselves, tensors cannot pose as control messages."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from actors.clients import RayDrafterClient, RayPolicyClient, RayRolloutClient, RayWaiter
from deploy.placement import actor_env
from deploy.session import ray_session
from services.config.schema import ClusterConfig
from services.coordinator.work import make_work
from services.core.errors import ControlMessageError, ServiceLostError, StaleEpochError, WaitTimeoutError
from services.core.types import AcceptanceStats, HiddenStateChunk, PartialRollout, ServedVersions, TrainBatch
from tests.services.coordinator.fakes import SAMPLING, make_prompts

pytestmark = pytest.mark.ray


class Server:
    """Answers like a rollout server and a drafter trainer, as far as these tests go."""

    def process_id(self) -> int:
        return os.getpid()

    def open_epoch(self, epoch: int) -> Any:
        if epoch < 0:
            raise StaleEpochError("epoch -1 is old: renew")
        if epoch == 99:
            return {"versions": torch.zeros(2)}
        return ServedVersions(1, None)

    def submit(self, work: Any, epoch: int) -> None:
        """Answers when there is a file of each name in `work`, for `epoch` seconds at most; at once without names."""
        give_up = time.monotonic() + epoch
        while not all(Path(name).exists() for name in work if isinstance(name, str)) and time.monotonic() < give_up:
            time.sleep(0.01)

    def withdraw(self, rollout_ids: Any, epoch: int) -> Any:
        if epoch == 99:
            return (torch.zeros(2),)
        return tuple(PartialRollout(i, 0, (4, 5), (-0.5, -1.0), (3,), (), AcceptanceStats(), 1.5) for i in rollout_ids)

    def load_policy(self, version: int, tensors: Any, epoch: int) -> ServedVersions:
        assert isinstance(tensors, dict) and torch.equal(tensors["w"], torch.arange(200_000.0))
        return ServedVersions(version, None)

    def publish(self) -> tuple[int, dict[str, torch.Tensor]]:
        return 7, {"w": torch.arange(200_000.0)}

    def take_states(self, step: int, epoch: int) -> tuple[HiddenStateChunk, list[torch.Tensor]]:
        if epoch < 0:
            raise StaleEpochError("epoch -1 is old: renew")
        return HiddenStateChunk(3, step, 1, 2, 16), [torch.arange(4.0)]

    def estimate(self, names: tuple[str, ...], chunk: Any, *states: Any) -> list[Any]:
        return [*names, chunk["w"].numel(), *(s["w"].numel() for s in states)]


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(ClusterConfig()):
        yield


@pytest.fixture(scope="module")
def handle(session: None) -> Iterator[Any]:
    actor = ray.remote(Server).options(num_cpus=0, max_restarts=1, max_task_retries=0).remote()
    yield actor
    ray.kill(actor)


def test_answers_errors_and_time_outs_arrive_as_themselves(handle: Any, tmp_path: Path) -> None:
    client = RayRolloutClient("rollout-0", handle)
    assert client.open_epoch(3).result(120) == ServedVersions(1, None)
    with pytest.raises(StaleEpochError, match="epoch -1 is old") as caught:
        client.open_epoch(-1).result(120)
    assert type(caught.value) is StaleEpochError
    gate = tmp_path / "open"
    slow = client.submit([str(gate)], 120)  # type: ignore[list-item]
    with pytest.raises(WaitTimeoutError, match=r"rollout-0\.submit did not answer within 0 s"):
        slow.result(0.1)
    assert RayWaiter().wait([slow], 0.1) == []
    gate.touch()
    assert RayWaiter().wait([slow], 60) == [slow]
    assert RayWaiter().wait([], 0.01) == []


def test_smuggled_tensors_are_refused_both_ways(handle: Any) -> None:
    client = RayRolloutClient("rollout-0", handle)
    (prompt,) = make_prompts(1)
    for bad in (torch.zeros(3), np.zeros(3), np.float32(1.0), b"raw"):
        smuggler = type(prompt)("p", "t", (1,), "a", "task", {"deep": [bad]})
        with pytest.raises(ControlMessageError, match="by reference"):
            client.submit([smuggler], 1)  # type: ignore[list-item]
        with pytest.raises(ControlMessageError, match="by reference"):
            client.submit_and_advance([smuggler], 0.1, 1)  # type: ignore[list-item]
    with pytest.raises(ControlMessageError, match="train_step"):
        RayPolicyClient("policy", handle).train_step(TrainBatch(torch.tensor(1), (), ()))  # type: ignore[arg-type]
    with pytest.raises(ControlMessageError, match=r"answer of rollout-0\.open_epoch"):
        client.open_epoch(99).result(120)
    client.submit(make_work([prompt], "plain", 2, SAMPLING, 0), 0).result(120)


def test_a_withdrawn_rollout_crosses_unchanged_and_goes_on_in_work(handle: Any) -> None:
    client = RayRolloutClient("rollout-0", handle)
    (work,) = make_work(make_prompts(1), "plain", 2, SAMPLING, 0)
    (found,) = client.withdraw([work.group_id], 1).result(120)
    assert found == PartialRollout(work.group_id, 0, (4, 5), (-0.5, -1.0), (3,), (), AcceptanceStats(), 1.5)
    client.submit([replace(work, partials=(found,))], 0).result(120)
    with pytest.raises(ControlMessageError, match=r"answer of rollout-0\.withdraw"):
        client.withdraw(["a"], 99).result(120)


def test_tensors_travel_by_reference_and_outlive_their_maker(handle: Any) -> None:
    maker = ray.remote(Server).options(num_cpus=0).remote()
    version, blob, head = RayPolicyClient("policy", maker).publish()
    assert head is blob
    assert version.result(120) == 7
    ray.kill(maker)
    assert RayRolloutClient("rollout-0", handle).load_policy(7, blob, 1).result(120) == ServedVersions(7, None)
    answer = RayDrafterClient("drafter-0", handle).estimate({"live": blob, "frozen": blob}, blob).result(120)
    assert answer == ["live", "frozen", 200_000, 200_000, 200_000]


def test_taken_states_stay_where_they_are(handle: Any) -> None:
    pending, blob = RayRolloutClient("rollout-0", handle).take_states(5, 1)
    assert pending.result(120) == HiddenStateChunk(3, 5, 1, 2, 16)
    assert torch.equal(ray.get(blob, timeout=120)[0], torch.arange(4.0))
    pending, _ = RayRolloutClient("rollout-0", handle).take_states(5, -1)
    with pytest.raises(StaleEpochError, match="epoch -1 is old"):
        pending.result(120)


def test_tensors_are_read_where_they_lie(session: None) -> None:
    """Two reads of one object meet the same memory: nothing was pickled, nothing copied."""
    maker = ray.remote(Server).options(num_cpus=0, runtime_env={"env_vars": actor_env(1)}).remote()
    reference = maker.publish.remote()
    (_, first), (_, second) = ray.get(reference, timeout=60), ray.get(reference, timeout=60)
    assert first["w"].data_ptr() == second["w"].data_ptr()
    assert torch.equal(first["w"], torch.arange(200_000.0))
    ray.kill(maker)


def test_a_killed_actor_is_a_lost_service_and_answers_again_after_its_restart(handle: Any, tmp_path: Path) -> None:
    client = RayRolloutClient("rollout-0", handle)
    first = client.process_id().result(120)
    under_way = client.submit([str(tmp_path / "never")], 120)  # type: ignore[list-item]
    time.sleep(0.3)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ServiceLostError) as caught:
        under_way.result(120)
    assert caught.value.name == "rollout-0"
    deadline = time.monotonic() + 60
    while True:
        try:
            second = client.process_id().result(120)
            break
        except ServiceLostError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert second != first


class Echo:
    """Many calls at once, each answered when its turn has come."""

    def __init__(self) -> None:
        self.turn = 0

    async def open_epoch(self, epoch: int) -> int:
        while self.turn < epoch:
            await asyncio.sleep(0.005)
        return epoch

    async def next(self, turn: int) -> None:
        self.turn = turn


def test_every_answer_is_told_once_it_is_there_in_whatever_order(session: None) -> None:
    """Also one that came while nobody waited, and whatever part of the calls is asked about."""
    actor = ray.remote(Echo).options(num_cpus=0, max_concurrency=200).remote()
    client, waiter, rng = RayRolloutClient("rollout-0", actor), RayWaiter(), random.Random(0)
    first = client.open_epoch(0)
    assert waiter.wait([first], 60) == [first], "the actor is there"
    calls = {client.open_epoch(turn): turn for turn in rng.choices(range(1, 9), k=120)}
    rest, asked = set(calls), set(list(calls)[::3])
    for turn in range(1, 9):
        assert waiter.wait(list(asked & rest), 0.0) == [], "their turn has not come"
        ray.get(actor.next.remote(turn), timeout=60)
        due = {call for call in rest if calls[call] == turn}
        if turn == 5:
            for call in due:  # answered while nobody waits
                assert call.result(60) == turn
        told = set[Any]()
        while told != due & asked:
            ready = waiter.wait(list((asked & rest) - told), 60)
            assert ready and set(ready) <= due and all(call.result(0) == turn for call in ready)
            told |= set(ready)
        while due - told:  # the others, about whom nobody asked meanwhile
            ready = waiter.wait(list(rest - told), 60)
            assert ready and set(ready) <= due
            told |= set(ready)
        rest -= due
    assert not rest
    late = client.open_epoch(60_000)
    ray.kill(actor)
    assert waiter.wait([late], 60) == [late], "a loss is an answer, too"
    with pytest.raises(ServiceLostError):
        late.result(0)
