"""What is left when a coordinator dies, and how another one takes over.

Everything of weight lives elsewhere: the policy trainer has the weights and counts the steps it applied, the drafter
trainers have their data and what they learned, the driver has what the run told it. So a new coordinator needs plain
values only. The step that was under way is generated anew, under the same seeds; one that the policy trainer had
applied already is not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.coordinator.observer import RunObserver
from services.core.types import EvalResult, Group, ProgressView, RunEvent, SlotSpan, StepMetrics

EPOCHS = 2**32  # of one incarnation: more than a run can use


@dataclass(frozen=True, slots=True)
class Takeover:
    """`incarnation` counts coordinators of this run from 0; its epochs are all greater than those of earlier ones, so
    that whatever they left on its way is refused. `elapsed_s` since the run began."""

    incarnation: int
    elapsed_s: float
    steps: tuple[StepMetrics, ...] = ()
    evaluations: tuple[EvalResult, ...] = ()
    events: int = 0
    drafter_version: int = 0
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of the metrics

    @property
    def first_epoch(self) -> int:
        return self.incarnation * EPOCHS


def takeover_message(takeover: Takeover, num_servers: int, recovered: bool, drafter_version: int) -> str:
    source = "what a trainer held" if recovered else "its first state"
    return (
        f"coordinator number {takeover.incarnation + 1} took over: {num_servers} servers answered, the drafter goes on "
        f"from {source} as version {drafter_version}"
    )


@dataclass
class RunMemory:
    """A RunObserver in front of another one that remembers what a takeover needs."""

    observer: RunObserver
    incarnation: int = 0
    steps: dict[int, StepMetrics] = field(default_factory=dict)
    evaluations: dict[int, EvalResult] = field(default_factory=dict)
    events: int = 0
    drafter_version: int = 0
    last_values: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def takeover(self, elapsed_s: float) -> Takeover:
        self.incarnation += 1
        return Takeover(
            self.incarnation,
            elapsed_s,
            tuple(self.steps.values()),
            tuple(self.evaluations.values()),
            self.events,
            self.drafter_version,
            self.last_values,
        )

    def step(self, metrics: StepMetrics) -> None:
        self.steps[metrics.step] = metrics
        self.observer.step(metrics)

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        self.observer.rollouts(step, groups)

    def evaluation(self, result: EvalResult) -> None:
        self.evaluations[result.step] = result
        self.observer.evaluation(result)

    def span(self, span: SlotSpan) -> None:
        self.observer.span(span)

    def event(self, event: RunEvent) -> None:
        self.events += 1
        self.observer.event(event)

    def progress(self, view: ProgressView) -> None:
        self.drafter_version = max(self.drafter_version, view.drafter_version)
        self.observer.progress(view)

    def endpoint(self, host: str, port: int) -> None:
        self.observer.endpoint(host, port)

    def values(self, state: Mapping[str, Sequence[float]]) -> None:
        self.last_values = state
        self.observer.values(state)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.observer.finish(summary)
