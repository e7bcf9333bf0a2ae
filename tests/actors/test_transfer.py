"""Weights between real processes, over gloo and through mapped memory: bit for bit, late joiners, peers that die or
fall silent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from deploy.session import ray_session
from services.config.schema import ClusterConfig
from services.config.weights import WeightsConfig
from services.core.errors import TransferError
from tests.actors.transfers import BACKEND, Receiver, Shapes, sender_class

pytestmark = pytest.mark.ray

CONFIG = WeightsConfig(transport="collective", part_bytes=2**20, connect_timeout_s=60.0, part_timeout_s=30.0)
SHAPES: Shapes = {
    "a.weight": ((300, 1000), "float32"),
    "scale": ((), "bfloat16"),
    "empty": ((0, 7), "float16"),
    "b.weight": ((4000, 333), "bfloat16"),
    "flags": ((13,), "bool"),
    "eight": ((1001,), "float8_e4m3fn"),
}
MANY: Shapes = {f"{n}.weight": ((512, 1024), "bfloat16") for n in range(24)}  # 24 parts


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(ClusterConfig()):
        yield


@pytest.fixture(params=["gloo", "ipc"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(backend: str) -> Iterator[Any]:
    made = []

    def make(kind: Any, *args: Any, **options: Any) -> Any:
        actor = kind if hasattr(kind, "remote") else ray.remote(kind)
        env = {"env_vars": {BACKEND: backend}}
        made.append(actor.options(num_cpus=0, runtime_env=env, **options).remote(*args))
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=150)


def hold(sender: Any, version: int, shapes: Shapes) -> tuple[Any, Any]:
    """(reference to the offer, bits): as the coordinator does, nobody here looks into an offer."""
    offer, found = sender.hold.options(num_returns=2).remote(version, shapes)
    return offer, get(found)


def failure(reference: Any) -> str:
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        get(reference)
    assert isinstance(caught.value.cause, TransferError), caught.value
    return str(caught.value.cause)


def test_versions_arrive_bit_for_bit_one_after_the_other_and_at_a_late_joiner(start: Any, backend: str) -> None:
    sender, first = start(sender_class(), CONFIG), start(Receiver, "rollout-0", CONFIG)
    for version in (1, 2):
        offer, sent = hold(sender, version, SHAPES)
        _, found = get(first.fetch.remote(offer))
        assert found == sent and len(found) == len(SHAPES)
    assert get(first.backend.remote()) == backend
    offer, sent = hold(sender, 3, MANY)
    assert get(first.fetch.remote(offer))[1] == sent
    late = start(Receiver, "rollout-1", CONFIG)
    get(late.process_id.remote())
    sender.work.remote(600.0)  # "training" when the late one asks
    assert get(late.fetch.remote(offer))[1] == sent


def test_a_superseded_offer_is_refused_and_the_next_one_works(start: Any) -> None:
    sender, receiver = start(sender_class(), CONFIG), start(Receiver, "rollout-0", CONFIG)
    old, _ = hold(sender, 1, SHAPES)
    new, sent = hold(sender, 2, SHAPES)
    assert "policy version 1 is superseded: version 2 is published" in failure(receiver.fetch.remote(old))
    assert get(receiver.fetch.remote(new))[1] == sent
    assert "superseded" in failure(receiver.fetch.remote(old))  # over an open link
    assert get(receiver.fetch.remote(new))[1] == sent


def test_a_version_that_is_superseded_on_its_way_ends_with_its_part(start: Any) -> None:
    sender, receiver = start(sender_class(), CONFIG), start(Receiver, "rollout-0", CONFIG)
    old, _ = hold(sender, 1, MANY)
    under_way = receiver.fetch.remote(old, 0.3)
    time.sleep(1.5)
    new, sent = hold(sender, 2, MANY)
    assert "superseded" in failure(under_way)
    assert get(receiver.fetch.remote(new))[1] == sent


def test_a_receiver_killed_on_the_way_disturbs_neither_the_sender_nor_another_receiver(start: Any) -> None:
    sender = start(sender_class(), CONFIG)
    doomed = start(Receiver, "rollout-0", CONFIG, max_restarts=1)
    other = start(Receiver, "rollout-1", CONFIG)
    offer, sent = hold(sender, 1, MANY)
    get(other.fetch.remote(offer))
    pid = get(doomed.process_id.remote())
    lost = doomed.fetch.remote(offer, 0.3)
    time.sleep(2.0)
    os.kill(pid, signal.SIGKILL)
    assert get(other.fetch.remote(offer))[1] == sent
    with pytest.raises(ray.exceptions.RayActorError):
        get(lost)
    assert get(sender.work.remote(0.1)) > 0
    deadline = time.monotonic() + 60
    while True:  # it returns as another process, and gets the current version
        try:
            assert get(doomed.fetch.remote(offer))[1] == sent
            return
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline
            time.sleep(0.3)


def test_a_sender_killed_on_the_way_is_told(start: Any) -> None:
    sender, receiver = start(sender_class(), CONFIG), start(Receiver, "rollout-0", CONFIG)
    offer, _ = hold(sender, 1, MANY)
    pid = get(sender.process_id.remote())
    lost = receiver.fetch.remote(offer, 0.3)
    time.sleep(2.0)
    os.kill(pid, signal.SIGKILL)
    assert "lost" in failure(lost) or "closed" in failure(lost)


def test_a_silent_receiver_costs_the_sender_its_time_out_and_no_other_receiver_anything(start: Any) -> None:
    """Stopped, not killed: what a partition looks like. Its connections stay open."""
    config = CONFIG.model_copy(update={"part_timeout_s": 4.0})
    sender = start(sender_class(), config)
    silent, other = start(Receiver, "rollout-0", config), start(Receiver, "rollout-1", config)
    big: Shapes = {f"{n}.weight": ((8192, 1024), "bfloat16") for n in range(4)}  # no socket buffer takes a part
    offer, sent = hold(sender, 1, big)
    pid = get(silent.process_id.remote())
    get(silent.fetch.remote(offer))
    stuck = silent.fetch.remote(offer, 0.3)
    time.sleep(0.5)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert get(other.fetch.remote(offer))[1] == sent
        assert get(sender.work.remote(0.1)) > 0
        time.sleep(config.part_timeout_s + 1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert failure(stuck)
    assert get(silent.fetch.remote(offer))[1] == sent
