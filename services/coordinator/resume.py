"""What is left when a coordinator or a whole run dies, and how another one takes over.

Everything of weight lives elsewhere: the policy trainer has the weights and counts the steps it applied, the drafter
trainers have their data and what they learned, the driver has what the run told it. So a new coordinator needs plain
values only. The step that was under way is generated anew, under the same seeds; one that the policy trainer had
applied already is not repeated.

A run that is resumed is taken over in the same way: the driver knows from the run folder what was told, and the policy
trainer has its weights, its optimizer and the drafter from a checkpoint. Steps after the checkpoint are done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.coordinator.observer import RunObserver
from services.core.checkpoints import CheckpointNote
from services.core.types import (
    ControlState,
    EvalResult,
    Group,
    ProgressView,
    RunEvent,
    ServedVersions,
    SlotSpan,
    StepMetrics,
    StrategySpan,
)

EPOCHS = 2**32  # of one incarnation: more than a run can use


@dataclass(frozen=True, slots=True)
class Takeover:
    """`incarnation` counts coordinators of this run from 0; its epochs are all greater than those of earlier ones, so
    that whatever they left on its way is refused. `elapsed_s` since the run began. `resumed`: every process is new."""

    incarnation: int
    elapsed_s: float
    steps: tuple[StepMetrics, ...] = ()
    evaluations: tuple[EvalResult, ...] = ()
    events: int = 0
    drafter_version: int = 0
    control: ControlState = field(default_factory=ControlState)
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of the metrics
    resumed: bool = False

    @property
    def first_epoch(self) -> int:
        return self.incarnation * EPOCHS


def drafter_version_after(known: int, served: Iterable[ServedVersions]) -> int:
    """The version under which the first drafter goes out: the known one again when no server has any, or else one that
    none of them has seen."""
    seen = [versions.drafter for versions in served if versions.drafter is not None]
    return max([known, *seen]) + 1 if seen else known


def takeover_message(takeover: Takeover, num_servers: int, source: str, drafter_version: int) -> str:
    return (
        f"coordinator number {takeover.incarnation + 1} took over: {num_servers} servers answered, the drafter goes on "
        f"from {source} as version {drafter_version}"
    )


def resumed_message(step: int, steps: int, note: CheckpointNote | None) -> str:
    if note is None:
        return f"no checkpoint was written before the run ended: it begins again with step 1 of {steps}"
    tokens = sum(chunk.num_tokens for chunk in note.buffer)
    data = f"; the {tokens} tokens of hidden states that the drafter had to learn from are gone" if tokens else ""
    drafter = "" if note.drafter_version is None else f", drafter version {note.drafter_version}"
    return f"goes on after step {step} of {steps} from its checkpoint{drafter}{data}"


@dataclass
class RunMemory:
    """A RunObserver in front of another one that remembers what a takeover needs."""

    observer: RunObserver
    incarnation: int = 0
    steps: dict[int, StepMetrics] = field(default_factory=dict)
    evaluations: dict[int, EvalResult] = field(default_factory=dict)
    events: int = 0
    drafter_version: int = 0
    control: ControlState = field(default_factory=ControlState)
    last_values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    policy_version: int = 0  # the last that went out

    @classmethod
    def of(cls, observer: RunObserver, before: Takeover | None) -> RunMemory:
        """Of a run that is new, or that goes on from `before`."""
        if before is None:
            return cls(observer)
        return cls(
            observer,
            before.incarnation,
            {m.step: m for m in before.steps},
            {e.step: e for e in before.evaluations},
            before.events,
            before.drafter_version,
            before.control,
            before.values,
        )

    def takeover(self, elapsed_s: float) -> Takeover:
        self.incarnation += 1
        return Takeover(
            self.incarnation,
            elapsed_s,
            tuple(self.steps.values()),
            tuple(self.evaluations.values()),
            self.events,
            self.drafter_version,
            self.control,
            self.last_values,
        )

    def rewind(self, step: int) -> None:
        """Forget what was told of later steps: they are done again."""
        self.steps = {s: metrics for s, metrics in self.steps.items() if s <= step}
        self.evaluations = {s: result for s, result in self.evaluations.items() if s <= step}

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

    def strategy(self, span: StrategySpan) -> None:
        self.observer.strategy(span)

    def event(self, event: RunEvent) -> None:
        self.events += 1
        self.observer.event(event)

    def progress(self, view: ProgressView) -> None:
        self.drafter_version = max(self.drafter_version, view.drafter_version)
        self.control = view.control
        self.policy_version = max(self.policy_version, view.policy_version)
        self.observer.progress(view)

    def endpoint(self, host: str, port: int) -> None:
        self.observer.endpoint(host, port)

    def values(self, state: Mapping[str, Sequence[float]]) -> None:
        self.last_values = state
        self.observer.values(state)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.observer.finish(summary)
