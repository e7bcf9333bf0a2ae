"""A run folder read back for the report: whatever is there, of a finished, stopped or crashed run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.core.types import RunEvent, SlotSpan, StrategySpan
from services.report.records import Row, number, read_json, read_lines
from services.report.rollouts_file import read_columns
from services.report.strategies import spans_of_rows
from services.report.trace import disjoint


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile with linear interpolation; `values` is not empty."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class StepTail:
    """Lengths of one step's rollouts, and what its tail cost: `tail_s` is how long the rollout went on after 90 % of
    the responses had finished, `tail_share` the same over the whole, in [0, 1]; None when the times don't tell."""

    step: int
    lengths: tuple[int, ...]
    truncated: int
    tail_share: float | None
    tail_s: float | None


@dataclass(frozen=True)
class RunData:
    """Everything the report draws. Rows are lines of the run folder's files."""

    run_id: str
    summary: Row
    config: str
    started_at: str
    steps: tuple[Row, ...]
    evaluations: tuple[Row, ...]
    spans: tuple[SlotSpan, ...]
    events: tuple[RunEvent, ...]
    tails: tuple[StepTail, ...]
    notes: tuple[str, ...] = field(default=())
    strategies: tuple[StrategySpan, ...] = ()

    @property
    def status(self) -> str:
        """What the run said when it ended; a crashed run said nothing."""
        return str(self.summary.get("status", "finished")) if self.summary else "unfinished"

    @property
    def end_s(self) -> float:
        """Wall time in seconds: as recorded, otherwise the last sign of life."""
        recorded = number(self.summary, "wall_seconds")
        seen = [s.end_s for s in self.spans] + [e.at_s for e in self.events]
        seen += [number(row, "at_s") or 0.0 for row in (*self.steps, *self.evaluations)]
        return recorded if recorded is not None else max(seen, default=0.0)


def _tail(path: Path) -> StepTail | None:
    rows = read_columns(path, ["step", "response_len", "finish_reason", "started_s", "finished_s"])
    if not rows:
        return None
    started, finished = min(r["started_s"] for r in rows), [r["finished_s"] for r in rows]
    end, p90 = max(finished), quantile(finished, 0.9)
    known = end > started and all(f >= started for f in finished)
    return StepTail(
        step=rows[0]["step"],
        lengths=tuple(r["response_len"] for r in rows),
        truncated=sum(r["finish_reason"] == "length" for r in rows),
        tail_share=(end - p90) / (end - started) if known else None,
        tail_s=end - p90 if known else None,
    )


def _spans(rows: Sequence[Row]) -> list[SlotSpan]:
    spans = []
    for row in rows:
        start, end = number(row, "start_s"), number(row, "end_s")
        if start is not None and end is not None:
            spans.append(SlotSpan(str(row.get("slot")), str(row.get("role")), start, end, str(row.get("label", ""))))
    return spans


def _events(rows: Sequence[Row]) -> list[RunEvent]:
    return [
        RunEvent(number(r, "at_s") or 0.0, str(r.get("kind")), str(r.get("subject")), str(r.get("message")))
        for r in rows
    ]


def _not_finite(steps: Sequence[Row]) -> list[str]:
    where: dict[str, list[int]] = {}
    for row in steps:
        for key in row.get("not_finite", ()):
            where.setdefault(key, []).append(row.get("step", 0))
    return [f"{key} was not a finite number at step {', '.join(map(str, at))}" for key, at in where.items()]


def load_run(run_dir: Path) -> RunData:
    """Read `run_dir`; missing files are empty, cut lines are counted in `notes`."""
    metrics, bad_metrics = read_lines(run_dir / "metrics.jsonl")
    span_rows, bad_spans = read_lines(run_dir / "spans.jsonl")
    event_rows, bad_events = read_lines(run_dir / "events.jsonl")
    strategy_rows, bad_strategies = read_lines(run_dir / "strategies.jsonl")
    spans, cut_s = disjoint(_spans(span_rows))
    steps = tuple(r for r in metrics if r.get("kind") == "step")
    notes = _not_finite(steps)
    if bad := bad_metrics + bad_spans + bad_events + bad_strategies:
        notes.append(f"{bad} unreadable line(s) in the run folder were left out")
    if cut_s > 0.05:
        notes.append(f"slot spans overlapped by {cut_s:.2f} s in all; the overlap went to the earlier span")
    about = read_json(run_dir / "run.json") or {}
    config = run_dir / "config.yaml"
    tails = [_tail(path) for path in sorted((run_dir / "rollouts").glob("step_*.parquet"))]
    return RunData(
        run_id=str(about.get("run_id", run_dir.resolve().name)),
        summary=read_json(run_dir / "summary.json") or {},
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        started_at=str(about.get("started_at", "")),
        steps=steps,
        evaluations=tuple(r for r in metrics if r.get("kind") == "evaluation"),
        spans=tuple(spans),
        events=tuple(_events(event_rows)),
        tails=tuple(t for t in tails if t is not None),
        notes=tuple(notes),
        strategies=tuple(spans_of_rows(strategy_rows)),
    )
