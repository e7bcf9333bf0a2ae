"""What a client says when a machine takes tensors with it, on a Ray of two nodes in this process tree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from actors.clients import RayDrafterClient
from services.core.errors import BlobLostError, ServiceLostError

pytestmark = [pytest.mark.ray, pytest.mark.slow]

LARGE = 4_000_000  # bytes: lies in a node's object store, not in the answer


class Trainer:
    def process_id(self) -> int:
        return os.getpid()

    def held(self) -> tuple[int, Any]:
        return 1, np.ones(LARGE // 8)

    def checkpoint(self, state: Any) -> None:
        assert state.sum() == LARGE // 8

    def export(self, state: Any) -> tuple[int, Any]:
        return 1, state * 2


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name, value in (("initial_delay_ms", 1000), ("period_ms", 1000), ("timeout_ms", 2000)):
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "labels": {"machine": "here"}})
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_tensors_that_went_with_a_machine_are_no_fault_of_who_was_called(cluster: Cluster) -> None:
    away = cluster.add_node(num_cpus=1, labels={"machine": "away"})
    ray.init(address=cluster.address, log_to_driver=False)
    made = ray.remote(Trainer)
    clients = {
        machine: RayDrafterClient(machine, made.options(num_cpus=0, label_selector={"machine": machine}).remote())
        for machine in ("here", "away")
    }
    (first, lost), (second, copied) = clients["away"].held(), clients["away"].held()
    assert first.result(60) == second.result(60) == 1
    clients["here"].checkpoint(copied).result(60)  # this machine has a copy from now on
    cluster.remove_node(away, allow_graceful=False)

    with pytest.raises(BlobLostError, match=r"here\.export was given tensors that are lost"):
        clients["here"].export(lost)[0].result(60)
    clients["here"].checkpoint(copied).result(60)
    assert isinstance(clients["here"].process_id().result(60), int)
    with pytest.raises(ServiceLostError, match="away is lost"):
        clients["away"].process_id().result(60)
