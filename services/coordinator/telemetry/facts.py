"""What the coordinator's parts tell the metrics beside what every observer gets: facts that come too often, or mean too
little to a person, to be written down one by one."""

from __future__ import annotations

from typing import Literal, Protocol

from services.core.protocols import Blob
from services.core.types import DrafterProgress, HiddenStateChunk, MemorySwitch, ServerReport, SlotLease

Weights = Literal["policy", "drafter"]


class Telemetry(Protocol):
    """Calls come from the coordinator's thread."""

    def slot_changed(self, before: SlotLease, after: SlotLease, now: float) -> None: ...

    def reported(self, slot: int, report: ServerReport) -> None: ...

    def decided(self, seconds: float) -> None:
        """A rollout server was sent on, so long after its answer was there."""

    def trained(self, slot: int, progress: DrafterProgress) -> None: ...

    def left(self, seconds: float) -> None:
        """A slot that trained the drafter is free, so long after it was asked to leave."""

    def states_added(self, chunk: HiddenStateChunk) -> None: ...

    def published(self, weights: Weights, version: int, seconds: float, blob: Blob) -> None: ...

    def switched(self, switch: MemorySwitch) -> None:
        """A colocated policy trainer released or resumed its memory; servers tell theirs in their reports."""

    def loaded(self, seconds: float) -> None:
        """Every server that is not lost serves the published versions, so long after they were published."""


class NoTelemetry:
    """For runs without metrics."""

    def slot_changed(self, before: SlotLease, after: SlotLease, now: float) -> None: ...

    def reported(self, slot: int, report: ServerReport) -> None: ...

    def decided(self, seconds: float) -> None: ...

    def trained(self, slot: int, progress: DrafterProgress) -> None: ...

    def left(self, seconds: float) -> None: ...

    def states_added(self, chunk: HiddenStateChunk) -> None: ...

    def published(self, weights: Weights, version: int, seconds: float, blob: Blob) -> None: ...

    def switched(self, switch: MemorySwitch) -> None: ...

    def loaded(self, seconds: float) -> None: ...


NO_TELEMETRY = NoTelemetry()
