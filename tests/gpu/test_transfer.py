"""Weights from the policy trainer's GPU to a rollout server's over NCCL: `pytest -m gpu tests/gpu/test_transfer.py -s`.

Two GPUs, one for the last test; no model folder, no SGLang. Figures go to results/transfer.json, of one GPU alone to
transfer_one_gpu.json; a table is printed at the end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from deploy.bench_publish import SHAPE_7B
from deploy.placement import TRAINER_ENV, actor_env
from services.config.weights import WeightsConfig
from services.core.errors import TransferError
from services.models.layers import model_spec
from services.models.target import target_names
from tests.actors.transfers import Receiver, Shapes, sender_class

NEEDS_MODEL = False  # for the folder's conftest
GPUS = torch.cuda.device_count()
two_gpus = pytest.mark.skipif(GPUS < 2, reason="NCCL connects two GPUs: this machine has fewer")

REPEATS = 5
CONFIG = WeightsConfig(transport="collective", part_timeout_s=6.0, connect_timeout_s=30.0)
BIG: Shapes = {name: (shape, "bfloat16") for name, shape in target_names(model_spec(SHAPE_7B)).items()}
SMALL: Shapes = {f"{n}.weight": ((4096, 4096), "bfloat16") for n in range(8)}
NUM_BYTES = sum(2 * torch.Size(shape).numel() for shape, _ in BIG.values())


@pytest.fixture(scope="module")
def figures(save: Callable[[str, dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {"bytes": NUM_BYTES}
    yield found
    name = "transfer" if GPUS > 1 else "transfer_one_gpu"
    save(name, {"gpus": GPUS, "config": CONFIG.model_dump(), "figures": found})
    print("\n" + "\n".join(f"{key:42} {value}" for key, value in found.items()))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local", num_gpus=min(GPUS, 2), include_dashboard=False, log_to_driver=True,
        object_store_memory=40 * 10**9, namespace="longtail",
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture
def pair(cluster: None) -> Iterator[tuple[Any, Any]]:
    """A sender on one GPU, a receiver on the other that is started again when it dies."""
    env = {"env_vars": actor_env(4) | TRAINER_ENV}
    sender = sender_class().options(num_cpus=1, num_gpus=1, runtime_env=env).remote(CONFIG, "cuda")
    plain = {"env_vars": actor_env(4)}
    made = ray.remote(Receiver).options(num_cpus=1, num_gpus=1, max_restarts=1, runtime_env=plain)
    receiver = made.remote("rollout-0", CONFIG, "cuda")
    get([sender.process_id.remote(), receiver.process_id.remote()])
    yield sender, receiver
    for actor in (sender, receiver):
        ray.kill(actor)
    time.sleep(1.0)  # their GPUs are free a moment later


def get(reference: Any, timeout_s: float = 90.0) -> Any:
    return ray.get(reference, timeout=timeout_s)


def hold(sender: Any, version: int, shapes: Shapes) -> tuple[Any, Any]:
    offer, found = sender.hold.options(num_returns=2).remote(version, shapes)
    return offer, get(found)


def transfer_error(reference: Any) -> str:
    with pytest.raises(RayTaskError) as caught:
        get(reference)
    assert isinstance(caught.value.cause, TransferError), caught.value
    return str(caught.value.cause)


@two_gpus
def test_a_7b_shaped_policy_over_nccl_and_over_the_object_store(pair: tuple[Any, Any], figures: dict[str, Any]) -> None:
    sender, receiver = pair
    offer, sent = hold(sender, 1, BIG)
    first_s, found = get(receiver.fetch.remote(offer))
    assert found == sent and len(found) == len(BIG)
    figures["backend"] = get(receiver.backend.remote())
    figures["first transfer, with connecting, s"] = round(first_s, 3)
    seconds = [get(receiver.fetch.remote(offer, 0.0, False))[0] for _ in range(REPEATS)]
    figures["later transfers, s"] = [round(s, 3) for s in seconds]
    figures["collective, GB/s"] = round(NUM_BYTES / median(seconds) / 1e9, 1)
    store = []
    for _ in range(3):
        started = time.monotonic()
        assert get(receiver.load.remote(sender.copy_of.remote(1))) == NUM_BYTES
        store.append(time.monotonic() - started)
    figures["object store, s"] = [round(s, 3) for s in store]
    figures["object store, GB/s"] = round(NUM_BYTES / median(store) / 1e9, 1)
    busy = sender.work.remote(4.0)  # training goes on meanwhile
    during_s, _ = get(receiver.fetch.remote(offer, 0.0, False))
    rate = get(busy)
    alone = get(sender.work.remote(4.0))
    figures["a transfer beside other work, s"] = round(during_s, 3)
    figures["other work beside it / alone"] = round(rate / alone, 3)
    assert figures["backend"] == "nccl"


@two_gpus
def test_a_killed_receiver_is_noticed_at_once_and_its_successor_served(
    pair: tuple[Any, Any], figures: dict[str, Any]
) -> None:
    sender, receiver = pair
    offer, sent = hold(sender, 1, BIG)
    get(receiver.fetch.remote(offer, 0.0, False))
    pid = get(receiver.process_id.remote())
    lost = receiver.fetch.remote(offer, 0.2, False)
    time.sleep(1.0)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(RayActorError):
        get(lost)
    assert get(sender.work.remote(0.1), 20.0) > 0
    figures["sender's GPU works again after a kill, s"] = round(time.monotonic() - killed, 3)
    while True:
        try:
            _, found = get(receiver.fetch.remote(offer))
            break
        except RayActorError:
            assert time.monotonic() < killed + 60
            time.sleep(0.3)
    assert found == sent
    figures["successor has the version after, s"] = round(time.monotonic() - killed, 3)


@two_gpus
def test_a_silent_receiver_ends_with_the_time_out(pair: tuple[Any, Any], figures: dict[str, Any]) -> None:
    """Stopped, as after a partition: nothing closes, NCCL itself would wait for ever."""
    sender, receiver = pair
    offer, sent = hold(sender, 1, BIG)
    get(receiver.fetch.remote(offer, 0.0, False))
    get(sender.work.remote(0.1))  # CUDA loads kernels at their first use, and waits for all that runs then
    pid = get(receiver.process_id.remote())
    stuck = receiver.fetch.remote(offer, 0.2, False)
    time.sleep(0.7)
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        assert get(sender.work.remote(0.1), 60.0) > 0
        figures["sender's GPU works beside a stuck transfer, s"] = round(time.monotonic() - stopped, 3)
        time.sleep(max(0.0, stopped + CONFIG.part_timeout_s + 2.0 - time.monotonic()))
        assert get(sender.work.remote(0.1), 20.0) > 0
    except GetTimeoutError:
        pytest.fail("a silent receiver holds the sender up")
    finally:
        os.kill(pid, signal.SIGCONT)
    figures["what the receiver said"] = transfer_error(stuck)
    assert get(receiver.fetch.remote(offer))[1] == sent


def test_two_processes_on_one_gpu_map_each_other_s_memory(cluster: None, figures: dict[str, Any]) -> None:
    """NCCL refuses two ranks on one GPU."""
    env = {"env_vars": {"CUDA_VISIBLE_DEVICES": "0"}}
    sender = sender_class().options(num_cpus=1, runtime_env=env).remote(CONFIG, "cuda")
    receiver = ray.remote(Receiver).options(num_cpus=1, runtime_env=env).remote("rollout-0", CONFIG, "cuda")
    offer, sent = hold(sender, 1, SMALL)
    assert get(receiver.fetch.remote(offer))[1] == sent
    seconds, _ = get(receiver.fetch.remote(offer, 0.0, False))
    size = 2 * 8 * 4096 * 4096
    figures["one GPU"] = f"{get(receiver.backend.remote())}, {size / seconds / 1e9:.2f} GB/s"
    assert get(receiver.backend.remote()) == "ipc"
    for actor in (sender, receiver):
        ray.kill(actor)
