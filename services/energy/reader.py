"""What the meter asks of a machine's GPUs. NVML implements it; tests bring a scripted one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from services.core.energy import EnergyMethod


class EnergyReader(Protocol):
    @property
    def entries(self) -> Mapping[str, str]:
        """From each asked entry of CUDA_VISIBLE_DEVICES to the GPU's uuid."""

    @property
    def methods(self) -> Mapping[str, EnergyMethod]:
        """What `read` gives, by uuid."""

    def read(self, uuid: str) -> float:
        """Joules by the GPU's counter (any zero, may restart), or watts at this moment where the method is "power".
        Raises MeterError."""

    def close(self) -> None: ...


# The reader of the GPUs named by these entries; None on a machine without an NVIDIA driver. Raises MeterError.
OpenReader = Callable[[Sequence[str]], EnergyReader | None]
