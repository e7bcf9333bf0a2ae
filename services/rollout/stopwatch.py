"""Wall seconds of the stages of a round, on the device that does the work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from services.core.protocols import Clock
from services.speculation.round import StageSeconds


@dataclass
class Stopwatch:
    """`start`, then `lap` at the end of each stage. On a GPU laps are events in its stream, so that they cost no
    waiting; `seconds` must be asked after the round's last synchronisation, and what the GPU did not do is `rest`."""

    device: torch.device
    clock: Clock
    _started_s: float = 0.0
    _marks: list[tuple[str, Any]] = field(default_factory=list)

    def start(self) -> None:
        self._started_s = self.clock()
        self._marks = [("", self._mark())]

    def lap(self, stage: str) -> None:
        """The time since the last mark belongs to `stage`, one of StageSeconds' but `rest`."""
        self._marks.append((stage, self._mark()))

    def seconds(self) -> StageSeconds:
        total = self.clock() - self._started_s
        found = {"extend": 0.0, "draft": 0.0, "verify": 0.0}
        for (_, before), (stage, after) in zip(self._marks, self._marks[1:], strict=False):
            found[stage] += self._between(before, after)
        return StageSeconds(**found, rest=max(0.0, total - sum(found.values())))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, before: Any, after: Any) -> float:
        return before.elapsed_time(after) / 1e3 if self.device.type == "cuda" else after - before
