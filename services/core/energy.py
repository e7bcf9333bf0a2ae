"""What energy meters tell the coordinator. Plain records and one protocol; standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from services.core.protocols import Pending

# "counter": the GPU counts its own joules; "power": samples of its power, integrated by the meter.
EnergyMethod = Literal["counter", "power"]


@dataclass(frozen=True, slots=True)
class GpuEnergy:
    """One GPU's energy since its meter started: `joules[i]`, never falling, at `times_s[i]`, rising, by the meter's own
    clock. `resets`: how often the GPU's counter began again from zero. `error`: why the last sample failed."""

    uuid: str
    method: EnergyMethod
    times_s: tuple[float, ...]
    joules: tuple[float, ...]
    resets: int = 0
    error: str | None = None

    def __post_init__(self) -> None:
        assert len(self.times_s) == len(self.joules)


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """A meter's answer. `now_s`: its clock when it answered. `entries`: from what CUDA_VISIBLE_DEVICES calls a GPU (an
    index or a uuid) to the uuid. `absent`: there is no NVIDIA driver and never will be a joule. `error`: why the meter
    could not start."""

    now_s: float
    gpus: tuple[GpuEnergy, ...] = ()
    entries: Mapping[str, str] = field(default_factory=dict)
    absent: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class GpuName:
    """A GPU as its user knows it: the meter of its machine, and its entry in CUDA_VISIBLE_DEVICES there."""

    meter: str
    entry: str


class EnergyClient(Protocol):
    """The energy meter of one machine."""

    @property
    def name(self) -> str: ...

    def read(self, since_s: float | None) -> Pending[EnergyReading]:
        """Samples from `since_s` of the meter's clock on and the one before, a fresh one last; None: all it has."""
