"""Actors land on the Ray nodes of their role."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from deploy.cli_shared import PRESETS_DIR
from deploy.cluster import actors
from deploy.inputs import load_inputs
from deploy.placement import HEAD, POLICY, ROLLOUT, role_label
from deploy.resuming import Start
from services.config.load import load_config
from services.config.schema import ClusterConfig
from tests.services.coordinator.world import tiny_config

ray = pytest.importorskip("ray")


@pytest.fixture
def cluster_by_role() -> Iterator[str]:
    """A head, and two nodes of one CPU and one pretended GPU each: which is which only their labels say."""
    from ray.cluster_utils import Cluster

    def labels(role: str) -> dict[str, str]:
        return {role_label(role): "true"}

    # Short, because sockets lie in it; its own, because the default folder tells address "auto" to every other process.
    folder = tempfile.mkdtemp(prefix="lt-")
    common = {"include_dashboard": False, "temp_dir": folder, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "labels": labels(HEAD), **common})
    try:
        for role in (POLICY, ROLLOUT):
            cluster.add_node(num_cpus=1, num_gpus=1, labels=labels(role))
        ray.init(address=cluster.address, namespace="longtail", logging_level="ERROR", log_to_driver=False)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def config_by_role() -> ClusterConfig:
    place = {"address": "auto", "role_labels": True, "gpus_per_slot": 0.5, "policy_gpus": 0.5, "cpus_per_slot": 0.5}
    wanted = [f"placement.{key}={json.dumps(value)}" for key, value in place.items()]
    return load_config("pocket-tiny", overrides=[*wanted, "model.device=cpu"], presets_dir=PRESETS_DIR)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_slots_and_policy_trainer_keep_to_their_nodes(cluster_by_role: str) -> None:
    config = config_by_role()
    node_of_role = {
        role: next(n["NodeID"] for n in ray.nodes() if n["Labels"].get(role_label(role)) == "true")
        for role in (HEAD, ROLLOUT, POLICY)
    }
    with actors(config, load_inputs(config), Start("roles")) as handles:
        # The public API asks the dashboard, which does not run here.
        found = ray._private.state.actors().values()
        where = {a["Name"].removeprefix("longtail-roles-"): a["Address"]["NodeID"] for a in found if a["Name"]}
    assert where.keys() == handles.keys()
    wanted = {name: ROLLOUT if name[-1].isdigit() else POLICY if name == "policy" else HEAD for name in where}
    assert {name: node_of_role[role] for name, role in wanted.items()} == where


def test_labels_need_a_cluster_that_has_them() -> None:
    with pytest.raises(ValueError, match=r"placement.role_labels needs a cluster.*placement.address: auto"):
        tiny_config(placement={"role_labels": True})
