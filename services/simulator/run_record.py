"""A run folder as the simulator reads it: the configuration, the steps, and of each rollout what it took.

Only whole steps count, from the first on: those of which both the metrics and the rollouts are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config.load import load_config
from services.config.naming import strategy_name
from services.config.schema import ClusterConfig
from services.config.speculation import FixedSelector
from services.core.errors import DataError
from services.core.types import StepMetrics
from services.report.history import EVENTS, ROLLOUTS, read_steps
from services.report.records import number, read_lines
from services.report.rollouts_file import read_columns, rollouts_path
from services.simulator.lockstep import Response
from services.speculation.strategy import OFF, DraftStrategy, draft_strategy

# What takes rollouts from one server to another, or the strategy from all: the step's times tell nothing then.
DISTURBING = frozenset(
    {"tail_moved", "slot_lost", "slot_returned", "server_restarted", "weights_lost", "strategy_forced"}
)
FORWARD = 1 / 3  # of a training step's arithmetic is the pass without gradients
_COLUMNS = (
    "group_id", "index", "reward", "server", "prompt_ids", "response_len", "acceptance_histogram", "steps_by_strategy",
    "started_s", "finished_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """`flat`: ids of groups whose rewards are all alike; `disturbed`: rollouts changed servers, or a person
    intervened."""

    metrics: StepMetrics
    responses: tuple[Response, ...]
    flat: frozenset[str] = frozenset()
    disturbed: bool = False

    def tokens(self, of_flat: float) -> float:
        """Of prompts and responses; those of flat groups count so much."""
        return sum((r.prompt_tokens + r.tokens) * (of_flat if r.group_id in self.flat else 1.0) for r in self.responses)


@dataclass(frozen=True)
class RecordedRun:
    name: str
    config: ClusterConfig
    steps: tuple[RecordedStep, ...]

    @property
    def counted(self) -> tuple[RecordedStep, ...]:
        """Without the first, which warms up."""
        return self.steps[1:] or self.steps

    @property
    def strategy(self) -> DraftStrategy | None:
        """The only one; None: the run chose among several."""
        selector = self.config.speculation.selector
        return draft_strategy(selector.strategy) if isinstance(selector, FixedSelector) else None

    @property
    def mode(self) -> str:
        """ "off", the name of the only strategy, or the kind of selector."""
        selector = self.config.speculation.selector
        return strategy_name(selector.strategy) if isinstance(selector, FixedSelector) else selector.type

    @property
    def of_flat(self) -> float:
        """What a token of a flat group is to the policy trainer, of one that it learns from: it passes over the group,
        runs it forward for the drafter's sake, or treats it like any other."""
        if self.config.policy.zero_variance == "keep":
            return 1.0
        forward = self.config.drafter.states == "policy" and self.config.speculation.learned
        return FORWARD if forward else 0.0

    @property
    def responses(self) -> Iterator[Response]:
        for step in self.steps:
            yield from step.responses


def read_run(folder: Path) -> RecordedRun:
    """Raises DataError when there is nothing to be read, and ConfigError when its configuration is none."""
    if not (folder / "config.yaml").is_file():
        raise DataError(f"{folder} is no run folder (it has no config.yaml): name a folder under runs/")
    config = load_config(folder / "config.yaml")
    metrics = [m for m in read_steps(folder) if rollouts_path(folder / ROLLOUTS, m.step).is_file()]
    if not metrics:
        raise DataError(
            f"{folder} has no step with its rollouts ({ROLLOUTS}/step_*.parquet beside metrics.jsonl): copy the whole "
            "run folder, or record a run with `longtail bench e2e --out DIR`"
        )
    if [m.step for m in metrics] != list(range(1, len(metrics) + 1)):
        raise DataError(f"{folder} lacks steps in between: it has {_said(m.step for m in metrics)}; record another run")
    disturbed = _disturbed(folder, metrics)
    return RecordedRun(str(folder), config, tuple(_step(folder, m, m.step in disturbed) for m in metrics))


def _step(folder: Path, metrics: StepMetrics, disturbed: bool) -> RecordedStep:
    rows = read_columns(rollouts_path(folder / ROLLOUTS, metrics.step), _COLUMNS)
    rewards: dict[str, set[float]] = {}
    for row in rows:
        rewards.setdefault(row["group_id"], set()).add(row["reward"])
    flat = frozenset(group for group, found in rewards.items() if len(found) == 1)
    return RecordedStep(metrics, tuple(_response(row) for row in rows), flat, disturbed)


def _response(row: Mapping[str, Any]) -> Response:
    steps = {str(name): int(count) for name, count in row["steps_by_strategy"] or ()}
    histogram = tuple(row["acceptance_histogram"] or ())
    rounds = sum(histogram) + steps.get(OFF.name, 0) if histogram else row["response_len"]
    return Response(
        row["group_id"], row["index"], row["server"], len(row["prompt_ids"]), row["response_len"], rounds,
        row["started_s"], row["finished_s"], histogram, steps,
    )  # fmt: skip


def _disturbed(folder: Path, metrics: Sequence[StepMetrics]) -> set[int]:
    """An event belongs to the first step that ends behind it."""
    rows, _ = read_lines(folder / EVENTS)
    moments = [number(row, "at_s") or 0.0 for row in rows if row.get("kind") in DISTURBING]
    found = [next((m.step for m in metrics if moment <= m.at_s), None) for moment in moments]
    return {step for step in found if step is not None}


def _said(steps: Iterator[int]) -> str:
    return ", ".join(map(str, steps))
