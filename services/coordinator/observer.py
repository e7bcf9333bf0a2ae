"""What the coordinator tells the outside. The report slice implements it to write the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from services.core.types import EvalResult, Group, ProgressView, RunEvent, SlotSpan, StepMetrics, StrategySpan


class RunObserver(Protocol):
    """Calls come from the coordinator's thread, in order; `finish` is called exactly once, also for a stopped or
    failed run, with the summary whose `status` says which."""

    def step(self, metrics: StepMetrics) -> None: ...

    def rollouts(self, step: int, groups: Sequence[Group]) -> None: ...

    def evaluation(self, result: EvalResult) -> None: ...

    def span(self, span: SlotSpan) -> None: ...

    def strategy(self, span: StrategySpan) -> None:
        """Which strategy ran at a slot's server, and why; told once the stretch is over or has gone on for seconds."""

    def event(self, event: RunEvent) -> None: ...

    def progress(self, view: ProgressView) -> None: ...

    def endpoint(self, host: str, port: int) -> None:
        """Where the coordinator serves its metrics; told again by one that takes over."""

    def values(self, state: Mapping[str, Sequence[float]]) -> None:
        """All values of the metrics, to go on counting from; every second, or every few with many slots."""

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class Fanout:
    """A RunObserver that passes every call on to several, in order."""

    def __init__(self, *observers: RunObserver) -> None:
        self._observers = observers

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> None:
            for observer in self._observers:
                getattr(observer, method)(*args)

        return call
