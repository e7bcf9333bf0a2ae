"""One run folder, read again and again: each look takes only what was added since the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.config.load import load_config
from services.coordinator.control import forceable
from services.core.errors import ConfigError
from services.gateway.line_tail import LineTail
from services.gateway.schema import (
    Evaluation,
    Event,
    OpenSpan,
    Progress,
    RunDetail,
    RunEntry,
    Span,
    Status,
    Step,
    Strategies,
    StrategyBucket,
    StrategyStretch,
    Totals,
    Version,
    Versions,
)
from services.report.records import Row, number, read_json
from services.report.strategies import by_bucket, of_steps, sentences, spans_of_rows

SILENT_S = 20.0  # a living run gives a sign every five seconds
STARTING_S = 1800.0  # engines that compile their kernels take long until the first one
ENDED = ("finished", "stopped", "failed")
STRETCHES = 4000  # the latest ones, that say which strategy runs
SERVICE_PHASES = ("policy", "reward")  # rows of the timeline that hold no slot


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment. The rows belong to lists that may have grown since: use the counts in `detail`."""

    path: Path
    detail: RunDetail
    steps: Sequence[Step]
    evaluations: Sequence[Evaluation]
    spans: Sequence[Span]
    events: Sequence[Event]
    open_spans: tuple[OpenSpan, ...]
    stretches: Sequence[StrategyStretch] = ()

    @property
    def strategies(self) -> Strategies:
        told = spans_of_rows([row.model_dump() for row in self.stretches[-STRETCHES:]])
        counted = of_steps(told) or told
        steps = [step.model_dump() for step in self.steps[: self.detail.num_steps_done]]
        rows = (StrategyBucket(running=b.name, rounds=b.rounds, share=dict(b.share)) for b in by_bucket(counted))
        return Strategies(sentences=tuple(sentences(counted, steps)), buckets=tuple(rows))

    @property
    def versions(self) -> Versions:
        steps = self.steps[: self.detail.num_steps_done]
        return Versions(
            policy=_changes([(s.step, s.at_s, s.policy_version) for s in steps]),
            drafter=_changes([(s.step, s.at_s, s.drafter_version) for s in steps]),
        )


class RunReader:
    """`read(now)` is for one thread at a time; `now` is Unix time in seconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._strategies: tuple[str, ...] | None = None
        self._open()

    def _open(self) -> None:
        self._steps = LineTail(self.path / "metrics.jsonl", Step, kind="step")
        self._evaluations = LineTail(self.path / "metrics.jsonl", Evaluation, kind="evaluation")
        self._spans = LineTail(self.path / "spans.jsonl", Span)
        self._events = LineTail(self.path / "events.jsonl", Event)
        self._stretches = LineTail(self.path / "strategies.jsonl", StrategyStretch)

    def read(self, now: float) -> RunSnapshot:
        if not all(tail.read_on() for tail in self._tails()):
            self._open()  # a file is another one than before: everything anew
            for tail in self._tails():
                tail.read_on()
        entry, progress, summary = read_entry(self.path, now)
        detail = self._detail(entry, progress, summary, now)
        return RunSnapshot(
            self.path,
            detail,
            self._steps.rows,
            self._evaluations.rows,
            self._spans.rows,
            self._events.rows,
            self._open_spans(detail),
            self._stretches.rows,
        )

    def _tails(self) -> tuple[LineTail[Any], ...]:
        return self._steps, self._evaluations, self._spans, self._events, self._stretches

    def _detail(self, entry: RunEntry, progress: Row, summary: Row, now: float) -> RunDetail:
        view = _progress(progress)
        alive_at, viewed_at = number(progress, "alive_at"), number(progress, "viewed_at")
        since = 0.0 if viewed_at is None or entry.status in (*ENDED, "silent") else max(0.0, now - viewed_at)
        error = summary.get("error")
        return RunDetail(
            run_id=entry.run_id,
            name=entry.name,
            status=entry.status,
            started_at=entry.started_at,
            error=None if error is None or entry.status not in ENDED else str(error),
            now_s=max(self._last_s(), (view.at_s + since) if view else 0.0),
            last_sign_s=None if alive_at is None else max(0.0, now - alive_at),
            progress=view,
            totals=self._totals(),
            strategies=self._forceable(),
            num_steps_done=len(self._steps.rows),
            num_evaluations=len(self._evaluations.rows),
            num_spans=len(self._spans.rows),
            num_events=len(self._events.rows),
            unreadable_lines=sum(tail.bad for tail in self._tails()),
            has_report=(self.path / "report.html").is_file(),
        )

    def _last_s(self) -> float:
        """The last moment that the rows know of; spans end in order of time, more or less."""
        ends = [s.end_s for s in self._spans.rows[-50:]] + [e.at_s for e in self._events.rows[-50:]]
        return max([*ends, *(s.at_s for s in self._steps.rows[-1:])], default=0.0)

    def _totals(self) -> Totals:
        steps, evaluations = self._steps.rows, self._evaluations.rows
        last = steps[-1] if steps else None
        return Totals(
            rollouts=sum(s.num_rollouts for s in steps),
            response_tokens=sum(s.response_tokens for s in steps),
            rollout_s=sum(s.rollout_s or 0.0 for s in steps),
            idle_s=sum(s.idle_s or 0.0 for s in steps),
            drafting_s=sum(s.drafting_s or 0.0 for s in steps),
            reward_mean=last.reward_mean if last else None,
            heldout_reward=evaluations[-1].reward_mean if evaluations else None,
            acceptance_length=last.acceptance_length if last else None,
            policy_version=last.policy_version if last else 0,
            drafter_version=last.drafter_version if last else 0,
        )

    def _forceable(self) -> tuple[str, ...]:
        if self._strategies is None:
            try:
                self._strategies = forceable(load_config(self.path / "config.yaml"))
            except ConfigError:  # written by another version of Longtail: it can be watched all the same
                self._strategies = ()
        return self._strategies

    def _open_spans(self, detail: RunDetail) -> tuple[OpenSpan, ...]:
        """Whatever is going on has no line yet: it began when the slot's last span ended."""
        view = detail.progress
        if view is None or detail.status not in ("running", "paused"):
            return ()
        ends: dict[str, float] = {}
        for span in self._spans.rows[-500:]:
            ends[span.slot] = max(span.end_s, ends.get(span.slot, 0.0))
        out = [OpenSpan(slot=s, role=role, start_s=ends.get(s, 0.0)) for s, role in view.slots.items()]
        if view.phase in SERVICE_PHASES:
            out.append(OpenSpan(slot=view.phase, role=view.phase, start_s=view.phase_at_s))
        return tuple(out)


def read_entry(path: Path, now: float) -> tuple[RunEntry, Row, Row]:
    """What the list of runs tells about one, and the two files that it comes from: progress.json and summary.json."""
    about = read_json(path / "run.json") or {}
    progress, summary = read_json(path / "progress.json") or {}, read_json(path / "summary.json") or {}
    view = _progress(progress)
    steps = number(summary, "steps")
    return (
        RunEntry(
            run_id=path.name,
            name=str(about.get("name", path.name)),
            status=_status(path, progress, summary, now),
            started_at=str(about.get("started_at", "")),
            steps_done=int(steps) if steps is not None else max(0, view.step - 1) if view else 0,
            num_steps=view.num_steps if view else None,
        ),
        progress,
        summary,
    )


def _status(path: Path, progress: Row, summary: Row, now: float) -> Status:
    alive_at = number(progress, "alive_at")
    living = alive_at is not None and now - alive_at < SILENT_S
    ended = summary.get("status")
    if ended in ENDED and not (living and alive_at * 1e9 > modified_ns(path / "summary.json")):  # type: ignore[operator]
        return ended  # type: ignore[no-any-return]
    if living:
        return "paused" if progress.get("phase") == "paused" else "running"
    return "starting" if alive_at is None and now - modified_ns(path / "run.json") / 1e9 < STARTING_S else "silent"


def modified_ns(path: Path) -> int:
    """When it was written last; 0 when it is not there."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _progress(row: Row) -> Progress | None:
    try:
        return Progress.model_validate(row)
    except ValidationError:  # none yet, or of another version
        return None


def _changes(points: Sequence[tuple[int, float, int]]) -> tuple[Version, ...]:
    out: list[Version] = []
    for step, at_s, version in points:
        if not out or out[-1].version != version:
            out.append(Version(step=step, at_s=at_s, version=version))
    return tuple(out)
