"""The slots of a run in Ray: one bundle of a placement group each."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.fitting import say
from deploy.placement import ROLLOUT, bundles, role_selector
from deploy.waiting import await_placed
from services.config.schema import ClusterConfig
from services.core.errors import WaitTimeoutError


def place_slots(config: ClusterConfig) -> Any:
    """The placement group of the slots, ready; None when slots ask for nothing."""
    wanted = bundles(config)
    if not wanted:
        return None
    selector = role_selector(config, ROLLOUT)
    labels = [selector] * len(wanted) if selector else None
    group = placement_group(wanted, strategy=config.placement.strategy, bundle_label_selector=labels)
    timeout_s = config.coordinator.start_timeout_s
    what = f"{len(wanted)} slots ({say(wanted[0])} each)"
    problem = await_placed(what, group.ready(), timeout_s)
    if problem is not None:
        remove_placement_group(group)
        raise WaitTimeoutError(f"{what} were not placed within {timeout_s:.0f} s: {problem}")
    return group


def first_gpu(group: Any, slot: int, config: ClusterConfig) -> str:
    """The lowest id of the slot's GPUs, as CUDA_VISIBLE_DEVICES takes it: asked from within the slot's bundle, which
    keeps its GPUs. Ray tells them in no order where CUDA_VISIBLE_DEVICES was set for Ray itself."""
    ask = ray.remote(_gpu_ids).options(
        num_cpus=0,
        num_gpus=config.placement.gpus_per_slot,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=slot),
    )
    timeout_s = config.coordinator.start_timeout_s
    try:
        ids: list[str] = ray.get(ask.remote(), timeout=timeout_s)
    except GetTimeoutError:
        raise WaitTimeoutError(
            f"slot {slot} did not tell its GPUs within {timeout_s:.0f} s: see the Ray logs"
        ) from None
    return min(ids, key=lambda i: (len(i), i))  # 9 before 10


def _gpu_ids() -> list[str]:
    ids: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return ids
