"""The workers that train one policy between them: who is who, and what the first of them collects.

Every worker holds a part of the weights (services/policy/sharding.py) and runs a part of a batch's packs. All of them
make the same calls in the same order, so that no collective call waits for one that never comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """`mesh` None: one worker that holds the whole policy, in no process group. `device`: where this one computes, None
    where the config says it. `offload`: weights and AdamW's state lie in host memory between passes."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    device: torch.device | None = None
    offload: bool = False

    @property
    def leads(self) -> bool:
        """Whether this worker answers for all."""
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """Every worker's value in the order of ranks where it leads, nothing elsewhere. Tensors in it are on the
        CPU."""
        if self.size == 1:
            return [value]
        found: list[T | None] | None = [None] * self.size if self.leads else None
        dist.gather_object(value, found, dst=0)
        return [v for v in found or () if v is not None]


ALONE = Team()


def joined_team(device: torch.device, offload: bool = False) -> Team:
    """Of the process group that this process is in."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return Team(rank, size, init_device_mesh(device.type, (size,)), device, offload)
