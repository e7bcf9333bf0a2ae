"""Energy meters on Ray: one actor on each node whose GPUs the run uses, none where it uses none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.clients import RayCall
from actors.energy import EnergyActor, GpuSeat
from deploy.placement import actor_env
from services.coordinator.energy import POLICY
from services.core.energy import GpuName
from services.energy.nvml import open_nvml
from services.energy.reader import OpenReader

# A meter that takes longer has missed the beginning of the first step, whose figures are then told as missing.
START_TIMEOUT_S = 30.0
MAX_RESTARTS = 3

Users = dict[str, tuple[GpuName, ...]]


def seats(handles: Mapping[str, Any], timeout_s: float) -> dict[str, GpuSeat]:
    """Where "slot <i>" and "policy" compute. A slot's drafter trainer works on GPUs of the slot's rollout server.

    Raises ServiceLostError and WaitTimeoutError.
    """
    holders = {name: _holder(name) for name in handles}
    asked = {
        holder: RayCall(handles[name].gpu_seat.remote(), name, "gpu_seat")
        for name, holder in holders.items()
        if holder is not None
    }
    return {holder: call.result(timeout_s) for holder, call in asked.items()}


def _holder(name: str) -> str | None:
    slot = re.fullmatch(r"rollout-(\d+)", name)
    return f"slot {slot[1]}" if slot else (POLICY if name == "policy" else None)


def plan_meters(placed: Mapping[str, GpuSeat]) -> tuple[dict[str, GpuSeat], Users]:
    """The meters by name, with all GPUs that they watch, and each holder's GPUs."""
    nodes = list(dict.fromkeys(seat.node for seat in placed.values() if seat.entries))
    names = {node: f"energy-{i}" for i, node in enumerate(nodes)}
    entries: dict[str, dict[str, None]] = {node: {} for node in nodes}
    for seat in placed.values():
        if seat.entries:
            entries[seat.node].update(dict.fromkeys(seat.entries))
    users = {
        holder: tuple(GpuName(names[seat.node], entry) for entry in seat.entries)
        for holder, seat in placed.items()
        if seat.entries
    }
    return {names[node]: GpuSeat(node, tuple(entries[node])) for node in nodes}, users


def start_meters(meters: Mapping[str, GpuSeat], open_reader: OpenReader = open_nvml) -> dict[str, Any]:
    """Handles by name, answering unless one is late."""
    handles = {name: _start(seat.node, seat.entries, open_reader) for name, seat in meters.items()}
    if handles:
        waiting = [handle.process_id.remote() for handle in handles.values()]
        ray.wait(waiting, num_returns=len(waiting), timeout=START_TIMEOUT_S)
    return handles


def _start(node: str, entries: Sequence[str], open_reader: OpenReader) -> Any:
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": MAX_RESTARTS,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": actor_env(1)},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return ray.remote(EnergyActor).options(**options).remote(entries, open_reader)


@dataclass(frozen=True)
class EnergyMeters:
    """The energy meters by name, and who uses which GPU."""

    handles: dict[str, Any]
    users: Users
    timeout_s: float

    def tell(self, coordinator: Any) -> None:
        told = coordinator.measure_energy.remote(self.handles, self.users)
        RayCall(told, "coordinator", "measure_energy").result(self.timeout_s)


def start_energy(handles: dict[str, Any], timeout_s: float) -> EnergyMeters:
    """They end with the other actors in `handles`."""
    meters, users = plan_meters(seats(handles, timeout_s))
    started = start_meters(meters)
    handles.update(started)
    return EnergyMeters(started, users, timeout_s)
