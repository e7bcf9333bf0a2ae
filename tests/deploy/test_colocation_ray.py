"""Ray of a head and two machines with pretended GPUs: a colocated policy's workers come to the slots' GPUs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.energy import GpuSeat, own_seat
from deploy.colocation import require_shared, slot_nodes, worker_selectors
from deploy.slots import place_slots
from services.config.schema import ClusterConfig
from services.core.errors import WaitTimeoutError
from tests.services.coordinator.world import tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

WAIT_S = 60.0


@pytest.fixture
def machines() -> Iterator[tuple[Cluster, list[Any]]]:
    folder = tempfile.mkdtemp(prefix="lt-")
    common = {"include_dashboard": False, "temp_dir": folder, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    try:
        nodes = [cluster.add_node(num_cpus=2, num_gpus=2) for _ in range(2)]
        ray.init(address=cluster.address, namespace="longtail", logging_level="ERROR", log_to_driver=False)
        yield cluster, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def shared(**placement: Any) -> ClusterConfig:
    place = {"policy": "colocated", "gpus_per_slot": 0.6, "policy_gpus": 0.4, "policy_workers": 2, "cpus_per_slot": 0.5}
    return tiny_config(placement=place | placement)


def seat_in(group: Any, bundle: int, gpus: float) -> GpuSeat:
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    asked = ray.remote(own_seat).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=place).remote()
    seat: GpuSeat = ray.get(asked, timeout=WAIT_S)
    return seat


@pytest.mark.parametrize("strategy", ["STRICT_PACK", "STRICT_SPREAD"])
def test_each_worker_takes_what_a_slot_left_of_its_gpu(machines: Any, strategy: str) -> None:
    """As Ray Train places them: in a placement group of their own. On one machine both GPUs are taken, of two machines
    each has a GPU to spare."""
    config = shared(strategy=strategy)
    slots = place_slots(config)
    selectors = worker_selectors(config, slot_nodes(slots, WAIT_S))
    workers = placement_group([{"CPU": 0.5, "GPU": 0.4}] * 2, bundle_label_selector=selectors)
    assert workers.wait(WAIT_S)
    under = [seat_in(slots, i, 0.6) for i in range(2)]
    found = [seat_in(workers, i, 0.4) for i in range(2)]
    assert sorted(found, key=str) == sorted(under, key=str)
    assert all(len(seat.entries) == 1 for seat in found)
    one = len({seat.node for seat in found}) == 1
    assert one == (strategy == "STRICT_PACK")
    if one:
        policy = GpuSeat(found[0].node, tuple(entry for seat in found for entry in seat.entries))
        require_shared({f"slot {i}": seat for i, seat in enumerate(under)} | {"policy": policy})
    remove_placement_group(slots)


def test_a_slot_whose_machine_is_lost_is_waited_for_until_it_has_another(machines: Any) -> None:
    cluster, nodes = machines
    slots = place_slots(shared(strategy="STRICT_SPREAD"))
    before = slot_nodes(slots, WAIT_S)
    assert len(set(before)) == 2
    (lost,) = (node for node in nodes if node.node_id == before[1])
    cluster.remove_node(lost)
    cluster.wait_for_nodes(WAIT_S)
    with pytest.raises(WaitTimeoutError, match=r"found no other within 1 s.*add a machine, or lower rollout"):
        slot_nodes(slots, 1.0)
    added = cluster.add_node(num_cpus=2, num_gpus=2)
    assert slot_nodes(slots, WAIT_S) == [before[0], added.node_id]
    remove_placement_group(slots)
