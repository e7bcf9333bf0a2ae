"""What this process holds of its GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GpuMemory(NamedTuple):
    """Bytes. `held`: by this process, but for what CUDA itself keeps. `free`: of the device, for whoever comes first:
    engines that start side by side on one GPU see each other there."""

    held: int
    free: int


def gpu_memory() -> GpuMemory:
    if not torch.cuda.is_available():
        return GpuMemory(0, 0)
    torch.cuda.empty_cache()  # what is kept for nothing is nobody's
    return GpuMemory(torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0])


def taken_since(before: GpuMemory, after: GpuMemory) -> tuple[int, int]:
    """(bytes that this process took, bytes by which the device's free memory fell)."""
    return after.held - before.held, before.free - after.free
