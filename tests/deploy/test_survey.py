"""Ray of two nodes in this process tree: each is asked, and what a run misses is told before it starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from deploy.cli_doctor import examine
from deploy.session import ray_session
from deploy.slots import place_slots
from services.core.errors import ConfigError, WaitTimeoutError
from tests.services.coordinator.world import tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "labels": {"longtail.io/policy": "true"}})
    nodes.add_node(num_cpus=2, num_gpus=2, labels={"longtail.io/rollout": "true"})
    yield nodes.address
    ray.shutdown()
    nodes.shutdown()


def test_doctor_looks_at_every_machine(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    examine(tiny_config(placement={"gpus_per_slot": 1.0}), address)
    told = capsys.readouterr().out
    assert told.count("object store") == 2 and told.count("(the driver runs here)") == 1
    assert "labels longtail.io/rollout=true" in told
    assert "warning" in told and "Ray was told of 2 GPUs, but no NVIDIA driver answers there" in told


def test_doctor_says_what_is_missing(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="1 of these would keep the run from starting"):
        examine(tiny_config(placement={"gpus_per_slot": 2.0, "cpus_per_slot": 1.0}), address)
    assert "error: resources: 2 slots and the policy trainer need 4 GPU, the cluster has 2" in capsys.readouterr().out


def test_a_run_does_not_start_where_something_is_missing(address: str) -> None:
    config = tiny_config(placement={"strategy": "STRICT_PACK", "cpus_per_slot": 1.5, "address": address})
    message = r"cannot start here:\n  resources: 2 slots and the policy trainer need 3\.5 CPU, the cluster has 3;"
    with pytest.raises(ConfigError, match=message), ray_session(config):
        pass


def test_slots_that_others_keep_waiting_say_for_what(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(
        placement={"gpus_per_slot": 1.0, "cpus_per_slot": 0.5, "address": address},
        coordinator={"start_timeout_s": 3.0},
    )
    with ray_session(config):
        holder = ray.remote(_Holder).options(num_gpus=1, num_cpus=0).remote()
        ray.get(holder.here.remote(), timeout=60)
        with pytest.raises(
            WaitTimeoutError, match=r"2 slots \(0\.5 CPU, 1 GPU each\) .* unused are 3 CPU, 1 GPU of 3 CPU, 2 GPU"
        ):
            place_slots(config)
        ray.kill(holder)


def test_an_address_where_nobody_answers_is_told_at_once() -> None:
    config = tiny_config(placement={"address": "127.0.0.1:1"})
    with pytest.raises(ConfigError, match=r"no Ray answers at placement\.address 127\.0\.0\.1:1"), ray_session(config):
        pass


class _Holder:
    def here(self) -> None: ...
