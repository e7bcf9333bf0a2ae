"""Slots of several GPUs, on a Ray that only believes in its GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.placement import bundles, plan_actors
from deploy.slots import first_gpu
from services.core.errors import WaitTimeoutError
from tests.services.coordinator.world import tiny_config

pytestmark = pytest.mark.ray
PLACEMENT = {"gpus_per_slot": 2.0, "policy_gpus": 1.0, "cpus_per_slot": 0.5}


GPUS = ("3", "4", "5", "6", "7")  # this Ray may use the last five of a machine's eight


@pytest.fixture(scope="module")
def five_gpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(GPUS))
        ray.init(address="local", num_cpus=2, num_gpus=5, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class Actor:
    def visible(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_row_65_a_drafter_trainer_works_on_one_gpu_of_its_own_slots_server(five_gpus: None) -> None:
    config = tiny_config(placement=PLACEMENT)
    group = placement_group(bundles(config))
    ray.get(group.ready(), timeout=60)
    seen: dict[str, str | None] = {}
    for plan in plan_actors(config):
        if plan.slot is None:
            continue
        env = {"CUDA_VISIBLE_DEVICES": first_gpu(group, plan.slot, config)} if plan.borrows_gpu else {}
        actor = ray.remote(Actor).options(
            num_cpus=0,
            num_gpus=plan.gpus,
            runtime_env={"env_vars": env},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=plan.slot),
        )
        seen[plan.name] = ray.get(actor.remote().visible.remote(), timeout=60)
    for slot in (0, 1):
        ids = (seen[f"rollout-{slot}"] or "").split(",")
        assert len(ids) == 2 and set(ids) <= set(GPUS) and seen[f"drafter-{slot}"] == min(ids)
    assert seen["rollout-0"] != seen["rollout-1"]
    remove_placement_group(group)


def test_a_slot_that_does_not_answer_is_named(five_gpus: None) -> None:
    config = tiny_config(placement=PLACEMENT, coordinator={"start_timeout_s": 1.0})
    group = placement_group([{"CPU": 0.5, "GPU": 2.0}])
    ray.get(group.ready(), timeout=60)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    holder = ray.remote(Actor).options(num_cpus=0, num_gpus=2, scheduling_strategy=strategy).remote()
    ray.get(holder.visible.remote(), timeout=60)  # it has both, so the question waits
    with pytest.raises(WaitTimeoutError, match="slot 0 did not tell its GPUs within 1 s"):
        first_gpu(group, 0, config)
    remove_placement_group(group)
