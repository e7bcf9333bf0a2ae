"""`runs/<id>/`: everything a run leaves behind, written while it runs.

    config.yaml        the resolved configuration, before anything starts
    run.json           id, name, start time
    metrics.jsonl      one line per step and per held-out evaluation ("kind" tells which)
    events.jsonl       lost servers, returns, published drafters, ...
    spans.jsonl        slot roles
    rollouts/          step_00001.parquet, ...
    metrics_endpoint.json  where Prometheus finds the metrics of the run while it runs, as file_sd_configs reads it
    metrics_values.json    the values of the metrics, to go on counting from
    summary.json, trace.json, report.html    at the end

Appends are one write of one whole line, so a killed run leaves a folder that `longtail report RUN_DIR` can render.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.config.load import dump_config
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError
from services.core.types import EvalResult, Group, ProgressView, RunEvent, SlotSpan, StepMetrics
from services.report.html import render_html
from services.report.records import Row, to_json, to_row, write_atomic
from services.report.rollouts_file import write_rollouts
from services.report.run_data import load_run
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

    Raises ConfigError when the folder can't be made or exists already: no run writes into another's folder.
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
        self._clock, self._started_s = clock, clock()
        started_at = now()
        self.run_id = make_run_id(config.run.name, started_at, token())
        self.path = config.run.dir / self.run_id
        try:
            self.path.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            raise ConfigError(f"run folder {self.path} exists: start again, or set another run.name") from None
        except OSError as error:
            raise ConfigError(
                f"cannot create {self.path} ({error.strerror}): set run.dir to a writable folder"
            ) from error
        self._rollouts = self.path / "rollouts"
        self._rollouts.mkdir()
        write_atomic(self.path / "config.yaml", dump_config(config))
        about = {"run_id": self.run_id, "name": config.run.name, "started_at": started_at.isoformat(timespec="seconds")}
        write_atomic(self.path / "run.json", to_json(about, indent=2) + "\n")
        self._metrics = _LineFile(self.path / "metrics.jsonl")
        self._events = _LineFile(self.path / "events.jsonl")
        self._spans = _LineFile(self.path / "spans.jsonl")
        self._progress_lock = threading.Lock()
        self._progress: ProgressView | None = None

    @property
    def drafter_dir(self) -> Path:
        """Where the exported drafter goes."""
        return self.path / "drafter"

    def step(self, metrics: StepMetrics) -> None:
        self._metrics.append(to_row(metrics, kind="step"))

    def evaluation(self, result: EvalResult) -> None:
        self._metrics.append(to_row(result, kind="evaluation"))

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Write one step's rollouts; a repeated step replaces its file."""
        write_rollouts(self._rollouts, step, groups)

    def span(self, span: SlotSpan) -> None:
        self._spans.append(to_row(span))

    def event(self, event: RunEvent) -> None:
        self._events.append(to_row(event))

    def progress(self, view: ProgressView) -> None:
        with self._progress_lock:
            self._progress = view

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

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, trace.json and report.html; call it also for a stopped run, with status "stopped"."""
        wall_s = round(self._clock() - self._started_s, 3)
        row = to_row({"run_id": self.run_id, "status": "finished", "wall_seconds": wall_s, **summary})
        write_atomic(self.path / "summary.json", to_json(row, indent=2) + "\n")
        (self.path / ENDPOINT_FILE).unlink(missing_ok=True)  # nothing is served there any more
        render_report(self.path)


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
