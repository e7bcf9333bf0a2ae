"""From a configuration to pods."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.k8s.sizing import Group, head_group, worker_groups
from deploy.placement import bundles
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError
from tests.services.coordinator.world import tiny_config


def groups(num_servers: int = 4, slots_per_pod: int = 1, **placement: Any) -> dict[str, Group]:
    config = tiny_config(placement=placement, rollout={"num_servers": num_servers})
    return {g.name: g for g in worker_groups(config, slots_per_pod)}


def test_slots_of_whole_gpus_get_a_pod_each() -> None:
    found = groups(gpus_per_slot=2, policy_gpus=4, cpus_per_slot=6, policy_cpus=8)
    rollout, policy = found["rollout"], found["policy"]
    assert (rollout.pods, rollout.gpus, rollout.cpus, rollout.cpu_limit) == (4, 2, 6, 7)
    assert (policy.pods, policy.gpus, policy.cpus) == (1, 4, 8)


def test_several_slots_in_a_pod_for_large_machines() -> None:
    rollout = groups(slots_per_pod=3, gpus_per_slot=2, policy_gpus=1, cpus_per_slot=6)["rollout"]
    assert (rollout.pods, rollout.gpus, rollout.cpus) == (2, 6, 18)
    assert groups(slots_per_pod=8, gpus_per_slot=1, policy_gpus=1)["rollout"].gpus == 4, "never more than there are"


def test_slots_that_share_a_gpu_share_a_pod() -> None:
    rollout = groups(gpus_per_slot=0.4, policy_gpus=1)["rollout"]
    assert (rollout.pods, rollout.gpus) == (2, 1)
    with pytest.raises(ConfigError, match="share a pod already"):
        groups(gpus_per_slot=0.4, policy_gpus=1, slots_per_pod=2)


def test_what_fits_one_gpu_is_one_pod_of_both_roles() -> None:
    found = groups(num_servers=2, gpus_per_slot=0.4, policy_gpus=0.2, cpus_per_slot=2, policy_cpus=2)
    assert found.keys() == {"shared"}
    shared = found["shared"]
    assert (shared.roles, shared.pods, shared.gpus, shared.cpus) == (("rollout", "policy"), 1, 1, 6)


def test_without_gpus_there_are_none() -> None:
    assert {g.gpus for g in groups().values()} == {0}


def test_memory_holds_the_object_store_and_the_drafters_buffer() -> None:
    small, large = (groups(object_store_bytes=b)["rollout"] for b in (2**30, 9 * 2**30))
    assert large.memory - small.memory == 8 * 2**30
    assert large.object_store == 9 * 2**30
    assert head_group(tiny_config(placement={"object_store_bytes": 2**30})).memory > 2**30


def test_local_mode_has_no_pods() -> None:
    with pytest.raises(ConfigError, match=r"set placement.mode: ray"):
        worker_groups(tiny_config(placement={"mode": "local"}))


def fitting(group: Group, config: ClusterConfig) -> int:
    """Slots that a pod of the group can hold, beside the policy trainer where it is there too."""
    place = config.placement
    beside = "policy" in group.roles
    have = {
        "CPU": group.cpus - (place.policy_cpus if beside else 0),
        "GPU": group.gpus - (place.policy_gpus if beside else 0),
    }
    wanted = bundles(config)[0]
    return int(min((have[name] + 1e-6) / amount for name, amount in wanted.items()))


@given(
    servers=st.integers(1, 9),
    gpus=st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.4, 0.5, 0.6, 1.0, 2.0, 8.0]),
    policy_gpus=st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0, 4.0]),
    cpus=st.sampled_from([0.25, 0.5, 1.0, 3.5]),
    policy_cpus=st.sampled_from([0.0, 0.5, 2.5]),
    per_pod=st.integers(1, 3),
    workers=st.sampled_from([1, 2, 3, 8, 9, 17]),
)
def test_every_slot_and_the_trainer_find_room(
    servers: int, gpus: float, policy_gpus: float, cpus: float, policy_cpus: float, per_pod: int, workers: int
) -> None:
    workers = workers if policy_gpus in (0, 1) else 1
    policy_cpus = policy_cpus or 0.25 if workers > 1 else policy_cpus
    place = {"gpus_per_slot": gpus, "policy_gpus": policy_gpus, "cpus_per_slot": cpus, "policy_cpus": policy_cpus}
    place["policy_workers"] = workers
    config = tiny_config(placement=place, rollout={"num_servers": servers})
    found = worker_groups(config, 1 if 0 < gpus < 1 else per_pod)
    assert sum(g.pods * fitting(g, config) for g in found if "rollout" in g.roles) >= servers
    (policy,) = [g for g in found if "policy" in g.roles]
    held = [(policy.gpus + 1e-6) / policy_gpus] if policy_gpus else []
    held += [(policy.cpus + 1e-6) / policy_cpus] if policy_cpus else []
    assert policy.pods * int(min(held, default=workers)) >= workers
    assert policy.gpus <= max(8, policy_gpus), "never more than a machine has"


def test_policy_workers_share_pods_evenly() -> None:
    found = {n: groups(policy_workers=n, policy_gpus=1, gpus_per_slot=1)["policy"] for n in (2, 8, 12)}
    assert [(g.pods, g.gpus) for g in found.values()] == [(1, 2), (1, 8), (2, 6)]
    assert found[8].memory - found[2].memory == 6 * 48 * 2**30


def test_a_colocated_policy_shares_one_pod_with_all_slots() -> None:
    shared = {"policy": "colocated", "gpus_per_slot": 0.6, "policy_gpus": 0.4, "policy_workers": 4}
    found = groups(**shared, cpus_per_slot=2, policy_cpus=3)
    assert list(found) == ["shared"]
    assert (found["shared"].pods, found["shared"].gpus, found["shared"].cpus) == (1, 4, 20)
    fewer = groups(**shared | {"policy_workers": 1})["shared"]
    assert fewer.gpus == 4, "slots of 0.6 have a GPU each, with a policy worker or without"
    together = {"gpus_per_slot": 0.2, "policy_gpus": 0.2, "policy_workers": 1}
    assert groups(policy="colocated", **together)["shared"].gpus == 1
    with pytest.raises(ConfigError, match="at most 8 GPUs"):
        groups(num_servers=9, **shared)
    assert groups(policy="colocated")["shared"].gpus == 0
