"""What the coordinator tells the outside. The report slice implements it to write the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from services.core.types import EvalResult, Group, ProgressView, RunEvent, SlotSpan, StepMetrics


class RunObserver(Protocol):
    """Calls come from the coordinator's thread, in order; `finish` is called exactly once, also for a stopped or
    failed run, with the summary whose `status` says which."""

    def step(self, metrics: StepMetrics) -> None: ...

    def rollouts(self, step: int, groups: Sequence[Group]) -> None: ...

    def evaluation(self, result: EvalResult) -> None: ...

    def span(self, span: SlotSpan) -> None: ...

    def event(self, event: RunEvent) -> None: ...

    def progress(self, view: ProgressView) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...
