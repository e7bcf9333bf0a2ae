"""Putting a colocated policy's workers on the slots' GPUs.

Ray Train places its workers in a placement group of its own, so that they cannot live in the slots' bundles. They are
bound to the slots' machines, and take of each GPU the part that the slot left: Ray gives parts of a GPU out of the
fullest one that has room. Where other GPUs are in reach it may still choose one of those, which is refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray.util.placement_group import placement_group_table

from actors.energy import GpuSeat
from services.config.schema import ClusterConfig
from services.coordinator.energy import POLICY
from services.core.errors import ConfigError, WaitTimeoutError

NODE_LABEL = "ray.io/node-id"
LOOK_S = 0.5  # between two looks at where slots are: Ray tells nobody


def slot_nodes(group: Any, timeout_s: float) -> list[str]:
    """The Ray node of each slot, once a slot whose machine was lost has another; empty where slots ask for nothing and
    are anywhere. Raises WaitTimeoutError."""
    if group is None:
        return []
    give_up_s = time.monotonic() + timeout_s
    while (table := placement_group_table(group))["state"] != "CREATED":
        if time.monotonic() >= give_up_s:
            raise WaitTimeoutError(
                f"a slot whose machine was lost found no other within {timeout_s:.0f} s, and a colocated policy needs "
                "all slots: add a machine, or lower rollout.num_servers"
            )
        time.sleep(LOOK_S)
    nodes: Mapping[int, str] = table["bundles_to_node_id"]
    return [nodes[slot] for slot in sorted(nodes)]


def worker_selectors(config: ClusterConfig, nodes: Sequence[str]) -> list[dict[str, str]]:
    """Ray's label selector of each policy worker: worker i goes where slot i is. Empty without GPUs to share."""
    if not config.placement.policy_gpus:
        return []
    return [{NODE_LABEL: node} for node in nodes[: config.placement.policy_workers]]


def require_shared(placed: Mapping[str, GpuSeat]) -> None:
    """`placed`: where "policy" and "slot <i>" compute. Raises ConfigError for a policy worker on a GPU without a slot.
    Of workers on several machines nothing is known here, see actors/policy_team.py."""
    slots = {(seat.node, entry) for holder, seat in placed.items() if holder != POLICY for entry in seat.entries}
    policy = placed[POLICY]
    strays = [entry for entry in policy.entries if (policy.node, entry) not in slots]
    if strays or len(set(policy.entries)) < len(policy.entries):
        taken = ", ".join(sorted(policy.entries))
        shared = ", ".join(sorted(entry for node, entry in slots if node == policy.node))
        raise ConfigError(
            f"placement.policy: colocated: Ray put the policy on GPU {taken} and the slots on GPU {shared}: start Ray "
            "with no more GPUs than there are slots, or raise gpus_per_slot and policy_gpus to 1 together"
        )
