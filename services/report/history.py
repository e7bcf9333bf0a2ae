"""What a run folder knows of a run that stopped or was killed, and cutting it back to the step it goes on from.

Events and spans (of slots and of strategies) stay: that work was done, if for nothing. Steps and evaluations after the
cut will be done again, so their lines go, or they would be counted twice.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from services.core.checkpoints import step_of, whole_checkpoints
from services.core.errors import ConfigError
from services.core.types import EvalResult, StepMetrics
from services.report.records import Row, number, read_lines, to_json, write_atomic
from services.report.rollouts_file import rollouts_path

METRICS, EVENTS, SPANS, STRATEGIES, ROLLOUTS, CHECKPOINTS = (
    "metrics.jsonl",
    "events.jsonl",
    "spans.jsonl",
    "strategies.jsonl",
    "rollouts",
    "checkpoints",
)
Record = TypeVar("Record", StepMetrics, EvalResult)


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What was recorded up to the step that the run goes on after; `elapsed_s`: its last sign of life before, so that
    what follows comes later on the run's own clock."""

    steps: tuple[StepMetrics, ...]
    evaluations: tuple[EvalResult, ...]
    events: int
    elapsed_s: float


def recorded_step(run_dir: Path) -> int:
    """The last step of which both the line and the rollouts are there. They are written in order; a step may be missing
    in between when the coordinator died before it could tell."""
    known = {row["step"] for row in read_lines(run_dir / METRICS)[0] if row.get("kind") == "step"}
    return max((step for step in known if rollouts_path(run_dir / ROLLOUTS, step).is_file()), default=0)


def read_steps(run_dir: Path) -> tuple[StepMetrics, ...]:
    """The recorded steps in order; of one that was done again the newest line. Raises ConfigError when another version
    of Longtail wrote them."""
    rows = {row["step"]: row for row in read_lines(run_dir / METRICS)[0] if row.get("kind") == "step"}
    return tuple(_record(StepMetrics, rows[step]) for step in sorted(rows))


def rewind(run_dir: Path, step: int) -> RunHistory:
    """Cut the folder back to the end of `step`, checkpoints included. Safe to be killed in: it is just done again."""
    metrics, *stays = (read_lines(run_dir / name)[0] for name in (METRICS, EVENTS, SPANS, STRATEGIES))
    events, spans, strategies = stays
    elapsed_s = max((_last_s(row) for rows in (metrics, *stays) for row in rows), default=0.0)
    kept = list({(row["kind"], row["step"]): row for row in metrics if row["step"] <= step}.values())
    for place in whole_checkpoints(run_dir / CHECKPOINTS):
        if step_of(place) > step:
            shutil.rmtree(place)
    for file in (run_dir / ROLLOUTS).glob("step_*.parquet"):
        if int(file.stem.removeprefix("step_")) > step:
            file.unlink()
    for name, rows in ((METRICS, kept), (EVENTS, events), (SPANS, spans), (STRATEGIES, strategies)):
        write_atomic(run_dir / name, "".join(to_json(row) + "\n" for row in rows))  # without a line cut by the kill
    for name in ("summary.json", "trace.json", "report.html"):
        (run_dir / name).unlink(missing_ok=True)  # of the run that ended early: it is not over
    return RunHistory(
        steps=tuple(_record(StepMetrics, row) for row in kept if row["kind"] == "step"),
        evaluations=tuple(_record(EvalResult, row) for row in kept if row["kind"] == "evaluation"),
        events=len(events),
        elapsed_s=elapsed_s,
    )


def superseded(steps: Sequence[int], recorded: int, rewards: Mapping[int, float], last: int, best: int) -> list[int]:
    """Which checkpoints may go. A run can only go on from a step that is recorded, so the newest `last` are counted
    among those up to `recorded`, and later ones stay. The `best` with the highest held-out reward stay too."""
    usable = sorted(step for step in steps if step <= recorded)
    judged = sorted((step for step in usable if step in rewards), key=lambda step: (rewards[step], step))
    kept = {*usable[-last:], *(judged[-best:] if best else ())}
    return [step for step in usable if step not in kept]


def _last_s(row: Row) -> float:
    return max(number(row, "at_s") or 0.0, number(row, "end_s") or 0.0)


def _record(kind: type[Record], row: Row) -> Record:
    """The record that was written as `row`. A number that was not finite comes back as NaN."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in row.get("not_finite", ()):
            values[field.name] = math.nan
        elif field.name in row:
            found = row[field.name]
            values[field.name] = tuple(found) if isinstance(found, list) else found
        elif field.default is MISSING:
            raise ConfigError(
                f"{METRICS} has no {field.name!r} at step {row['step']}: it is of another version of Longtail; "
                "go on with that version, or use another run.id"
            )
    return kind(**values)
