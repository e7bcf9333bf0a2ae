"""A reader whose GPUs say what the test wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.core.energy import EnergyMethod
from services.core.errors import MeterError


@dataclass
class ScriptedReader:
    """`values` by uuid: joules or watts as a function of time."""

    clock: Callable[[], float]
    values: dict[str, Callable[[float], float]]
    entries: Mapping[str, str] = field(default_factory=dict)
    power: bool = False
    gone: set[str] = field(default_factory=set)
    closed: bool = False
    reads: int = 0

    @property
    def methods(self) -> dict[str, EnergyMethod]:
        return dict.fromkeys(self.values, "power" if self.power else "counter")

    def read(self, uuid: str) -> float:
        self.reads += 1
        if uuid in self.gone:
            raise MeterError(f"{uuid}: NVML says GPU is lost; see nvidia-smi")
        return self.values[uuid](self.clock())

    def close(self) -> None:
        self.closed = True
