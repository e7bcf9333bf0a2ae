"""The energy meter of one machine as an actor, on a node that hosts GPUs of the run: builds the service and delegates.

It asks Ray for no GPU: NVML sees a machine's GPUs whatever CUDA_VISIBLE_DEVICES says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from services.core.energy import EnergyReading
from services.energy.nvml import open_nvml
from services.energy.reader import OpenReader
from services.energy.service import EnergyService


@dataclass(frozen=True, slots=True)
class GpuSeat:
    """Where an actor computes: its Ray node, and its GPUs as CUDA_VISIBLE_DEVICES calls them there."""

    node: str
    entries: tuple[str, ...]


def own_seat() -> GpuSeat:
    """Of the actor that asks."""
    context = ray.get_runtime_context()
    return GpuSeat(context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", ())))


class EnergyActor:
    def __init__(self, entries: Sequence[str], open_reader: OpenReader = open_nvml) -> None:
        self._service = EnergyService(entries, open_reader, time.monotonic)

    def process_id(self) -> int:
        return os.getpid()

    def read(self, since_s: float | None) -> EnergyReading:
        return self._service.read(since_s)
