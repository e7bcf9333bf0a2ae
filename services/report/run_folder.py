"""`runs/<id>/`: everything a run leaves behind, written while it runs.

    config.yaml        the resolved configuration, before anything starts
    run.json           id, name, first start, and every start with the step it went on after
    metrics.jsonl      one line per step and per held-out evaluation ("kind" tells which)
    events.jsonl       lost servers, returns, published drafters, ...
    spans.jsonl        slot roles
    strategies.jsonl   which draft strategy ran at which slot when, and why
    rollouts/          step_00001.parquet, ...
    progress.json      what is happening now, replaced about once a second
    metrics_endpoint.json  where Prometheus finds the metrics of the run while it runs, as file_sd_configs reads it
    metrics_values.json    the values of the metrics, to go on counting from
    checkpoints/       step-0000000005/, ... to go on from (written by the policy trainer)
    lock.json          who drives the run
    summary.json, trace.json, report.html    at the end

Appends are one write of one whole line, so a killed run leaves a folder that `longtail report RUN_DIR` can render.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.config.load import dump_config, load_config
from services.config.resume import changed_settings
from services.config.schema import ClusterConfig
from services.core.checkpoints import step_folder, step_of, whole_checkpoints
from services.core.errors import ConfigError
from services.core.types import EvalResult, Group, ProgressView, RunEvent, SlotSpan, StepMetrics, StrategySpan
from services.report.history import (
    CHECKPOINTS,
    EVENTS,
    METRICS,
    ROLLOUTS,
    SPANS,
    STRATEGIES,
    RunHistory,
    recorded_step,
    rewind,
    superseded,
)
from services.report.html import render_html
from services.report.progress_file import ProgressFile
from services.report.records import Row, read_json, to_json, to_row, write_atomic
from services.report.rollouts_file import write_rollouts
from services.report.run_data import load_run
from services.report.run_lock import RunLock
from services.report.trace import build_trace

ENDPOINT_FILE = "metrics_endpoint.json"
VALUES_FILE = "metrics_values.json"


class _LineFile:
    """Appends whole lines, unbuffered, from any thread; opened for each line, so there is nothing to close or lose."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        path.touch()

    def append(self, row: Row) -> None:
        data = to_json(row).encode("ascii") + b"\n"
        with self._lock, open(self._path, "ab", buffering=0) as file:
            while data:  # a regular file takes it all at once unless the disk is full, which raises
                data = data[file.write(data) or 0 :]


def make_run_id(name: str, now: datetime, token: str) -> str:
    """`<name>-<UTC time>-<token>`; characters that are no part of a plain folder name become dashes."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    return f"{plain[:80]}-{now.astimezone(UTC):%Y%m%d-%H%M%S}-{token}"


class RunFolder:
    """The observer that writes the run folder. Every method may be called from any thread.

    With `config.run.id` a folder that is there is opened again: `reopened` is true, and `rewind` must be called before
    anything is written. Raises ConfigError when the folder can't be made, when another driver has it, and when the run
    in it was begun with other settings that matter; without `run.id` also when it exists: no run writes into another's
    folder by accident.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        token: Callable[[], str] = lambda: secrets.token_hex(3),
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._say = say
        self._clock, self._started_s, self._config = clock, clock(), config.run
        self._started_at = now().isoformat(timespec="seconds")
        self.run_id = config.run.id or make_run_id(config.run.name, now(), token())
        self.path = config.run.dir / self.run_id
        _make_folder(self.path, may_exist=config.run.id is not None)
        self._lock = RunLock(self.path)
        try:
            self.reopened = _check_settings(self.path, config)
        except ConfigError:
            self.close()
            raise
        self._rollouts = self.path / ROLLOUTS
        self._rollouts.mkdir(exist_ok=True)
        write_atomic(self.path / "config.yaml", dump_config(config))
        self._rewards: dict[int, float] = {}
        self.held: int | None = None  # a checkpoint that somebody reads: it stays
        self._metrics = _LineFile(self.path / METRICS)
        self._events = _LineFile(self.path / EVENTS)
        self._spans = _LineFile(self.path / SPANS)
        self._strategies = _LineFile(self.path / STRATEGIES)
        self._progress_file = ProgressFile(self.path / "progress.json")
        self._progress_lock = threading.Lock()
        self._progress: ProgressView | None = None
        about = read_json(self.path / "run.json") or {}
        self._first_start = about.get("started_at", self._started_at)
        self._starts: list[Row] = [*about.get("starts", ()), {"at": self._started_at, "after_step": 0}]
        self._write_about()

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def incarnation(self) -> int:
        """How many drivers this run had before this one."""
        return len(self._starts) - 1

    def recorded_step(self) -> int:
        """The last step that the folder knows whole: no checkpoint after it can be gone on from."""
        return recorded_step(self.path)

    def rewind(self, step: int) -> RunHistory:
        """Go on after `step`: what was recorded later is taken out. Returns what is known up to there."""
        history = rewind(self.path, step)
        self._rewards = {e.step: e.reward_mean for e in history.evaluations}
        return history

    def note_start(self, after_step: int) -> None:
        """Which step this start of the run goes on after."""
        self._starts[-1]["after_step"] = after_step
        self._write_about()

    def close(self) -> None:
        """Let another driver have the folder. `finish` does it too."""
        self._lock.release()

    def _write_about(self) -> None:
        about = {
            "run_id": self.run_id,
            "name": self._config.name,
            "started_at": self._first_start,
            "starts": self._starts,
        }
        write_atomic(self.path / "run.json", to_json(about, indent=2) + "\n")

    def reachable_at(self, ray: Mapping[str, str | None]) -> None:
        """Tell in run.json where the run's Ray answers and how, so that the run can be controlled from another
        process."""
        self._starts[-1]["ray"] = dict(ray)
        self._write_about()

    @property
    def drafter_dir(self) -> Path:
        """Where the exported drafter goes."""
        return self.path / "drafter"

    def step(self, metrics: StepMetrics) -> None:
        self._metrics.append(to_row(metrics, kind="step"))
        self._prune(metrics.step - 1)  # this step's rollouts are not written yet

    def evaluation(self, result: EvalResult) -> None:
        self._rewards[result.step] = result.reward_mean
        self._metrics.append(to_row(result, kind="evaluation"))

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Write one step's rollouts; a repeated step replaces its file."""
        write_rollouts(self._rollouts, step, groups)

    def span(self, span: SlotSpan) -> None:
        self._spans.append(to_row(span))

    def strategy(self, span: StrategySpan) -> None:
        self._strategies.append(to_row(span))

    def event(self, event: RunEvent) -> None:
        self._events.append(to_row(event))

    def progress(self, view: ProgressView) -> None:
        with self._progress_lock:
            self._progress = view
        self._progress_file.offer(view)

    def latest_progress(self) -> ProgressView | None:
        """The newest view, for the live display; None before the first."""
        with self._progress_lock:
            return self._progress

    def endpoint(self, host: str, port: int) -> None:
        """Tell Prometheus where to scrape, and the person at the console."""
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        write_atomic(self.path / ENDPOINT_FILE, json.dumps([{"targets": [where]}]) + "\n")
        self._say(f"metrics: http://{where}/metrics")

    def values(self, state: Mapping[str, Sequence[float]]) -> None:
        write_atomic(self.path / VALUES_FILE, to_json(to_row(state)) + "\n")

    def kept_values(self) -> Row:
        """The values of the metrics when the run was last driven; empty when it is new."""
        return read_json(self.path / VALUES_FILE) or {}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, trace.json and report.html; call it also for a stopped run, with status "stopped"."""
        self._progress_file.close()
        wall_s = round(self._clock() - self._started_s, 3)
        row = to_row({"run_id": self.run_id, "status": "finished", "wall_seconds": wall_s, **summary})
        write_atomic(self.path / "summary.json", to_json(row, indent=2) + "\n")
        (self.path / ENDPOINT_FILE).unlink(missing_ok=True)  # nothing is served there any more
        render_report(self.path)
        self._prune(self.recorded_step())
        self._lock.release()

    def _prune(self, recorded: int) -> None:
        """Take away the checkpoints that are not needed any more."""
        for step in self.superseded([step_of(place) for place in whole_checkpoints(self.checkpoints)], recorded):
            if step != self.held:
                shutil.rmtree(step_folder(self.checkpoints, step))

    def superseded(self, steps: Sequence[int], recorded: int) -> list[int]:
        """Which of these checkpoints are not needed any more."""
        return superseded(steps, recorded, dict(self._rewards), self._config.keep_last, self._config.keep_best)


def _make_folder(path: Path, may_exist: bool) -> None:
    try:
        path.mkdir(parents=True, exist_ok=may_exist)
    except FileExistsError:
        remedy = "it is no folder, set another run.id" if may_exist else "start again, or set another run.name"
        raise ConfigError(f"run folder {path} exists: {remedy}") from None
    except OSError as error:
        raise ConfigError(f"cannot create {path} ({error.strerror}): set run.dir to a writable folder") from error


def _check_settings(path: Path, config: ClusterConfig) -> bool:
    """Whether there is a run to go on with; ConfigError when it is another one than `config` asks for."""
    stored = path / "config.yaml"
    if not stored.is_file():
        strange = sorted(f.name for f in path.iterdir() if f.name not in ("lock.json", ROLLOUTS))
        if strange:
            raise ConfigError(
                f"{path} is no run folder: it has no config.yaml, but {', '.join(strange[:3])}; set another run.id"
            )
        return False
    changed = changed_settings(load_config(stored), config)
    if changed:
        raise ConfigError(
            f"run {path.name} was begun with other settings: {'; '.join(changed)}. Go on with its own, or set another "
            "run.id for a run of these"
        )
    return True


def finished_summary(config: ClusterConfig) -> Row | None:
    """The summary of the run called `run.id` when it is over and has all the steps asked for; None otherwise."""
    if config.run.id is None:
        return None
    summary = read_json(config.run.dir / config.run.id / "summary.json")
    over = summary is not None and summary.get("status") == "finished" and summary["steps"] >= config.run.steps
    return summary if over else None


def render_report(run_dir: Path) -> Path:
    """Draw `trace.json` and `report.html` from the files of `run_dir` alone; returns the report's path.

    Raises ConfigError when `run_dir` is no run folder.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is no run folder (it has no config.yaml): name a folder under runs/")
    run = load_run(run_dir)
    write_atomic(run_dir / "trace.json", to_json(build_trace(run.spans, run.events, run.steps)))
    path = run_dir / "report.html"
    write_atomic(path, render_html(run))
    return path
