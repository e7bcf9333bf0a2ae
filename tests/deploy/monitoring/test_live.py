"""Debian's Prometheus scrapes a real run, whose coordinator is killed on the way; then every panel is asked."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray

from deploy.cli_shared import config_of
from deploy.cluster import run_on_ray
from deploy.monitoring.grafana import FOLDER
from deploy.monitoring.prometheus_server import ServerOptions, prometheus_running, write_targets
from deploy.monitoring.queries import Line, PrometheusApi, panel_queries
from deploy.monitoring.serving import SERVING
from deploy.resuming import start_of
from services.coordinator.telemetry.table import METRICS, sample_names
from services.core.types import ProgressView
from services.report.run_folder import ENDPOINT_FILE, VALUES_FILE, RunFolder
from tests.deploy.tiny_run import generates

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

# Long phases, see generates().
STEPS, PROMPTS, GROUP = 40, 12, 2
# What a run without GPUs cannot feed: nobody lends memory, so there is no mean of a switch.
EMPTY = {"{{switch}}, seconds", "{{switch}}, GB"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class KillingFolder:
    """The run folder, and a SIGKILL for the coordinator in the middle of a rollout phase."""

    folder: RunFolder
    processes: dict[str, int] = field(default_factory=dict)
    killed: bool = False
    seen: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, method: str) -> Any:
        return getattr(self.folder, method)

    def learn(self, handles: dict[str, Any]) -> None:
        self.processes = {name: ray.get(h.process_id.remote(), timeout=60) for name, h in handles.items()}
        self.seen["endpoint"] = json.loads((self.folder.path / ENDPOINT_FILE).read_text()) if self._told() else None

    def _told(self) -> bool:
        return (self.folder.path / ENDPOINT_FILE).is_file()

    def endpoint(self, host: str, port: int) -> None:
        self.folder.endpoint(host, port)
        self.seen.setdefault("endpoints", []).append((host, port))

    def progress(self, view: ProgressView) -> None:
        self.folder.progress(view)
        if view.step >= 5 and generates(view) and not self.killed:
            self.killed = True
            os.kill(self.processes["coordinator"], signal.SIGKILL)


@dataclass
class Watched:
    api: PrometheusApi
    folder: KillingFolder
    start_s: float
    end_s: float
    port: int

    def window(self, expr: str) -> list[Line]:
        return self.api.query_range(expr, self.start_s, self.end_s, 1.0)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    runs = tmp_path_factory.mktemp("runs")
    port, metrics_port = free_port(), free_port()
    settings = [f"run.steps={STEPS}", f"run.dir={json.dumps(str(runs))}", "run.compare_prompts=0"]
    settings += [f"rollout.prompts_per_step={PROMPTS}", f"rollout.engine.max_running={GROUP}"]
    settings += [f"coordinator.metrics.port={metrics_port}", "coordinator.start_timeout_s=300"]
    strategies = "[{drafter: eagle, depth: 2, num_draft_tokens: 3}]"
    settings += [f"speculation.selector={{type: adaptive, strategies: {strategies}}}"]  # it predicts what it gains
    config = config_of("pocket-tiny", settings)
    options = ServerOptions(port, 1, runs / ".prometheus")
    options.data.mkdir()
    folder, done = KillingFolder(RunFolder(config)), threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            write_targets(runs, options.data)

    write_targets(runs, options.data)
    with prometheus_running(options):
        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        start_s = time.time()
        start = start_of(config, folder.folder)
        run_on_ray(config, folder, on_start=folder.learn, start=start)  # type: ignore[arg-type]
        done.set()
        looking.join(timeout=120)
        yield Watched(PrometheusApi(options.url), folder, start_s, time.time(), metrics_port)


def finite(lines: list[Line]) -> list[Line]:
    return [line for line in lines if any(math.isfinite(value) for _, value in line.points)]


def test_every_query_of_every_panel_runs_and_has_data(watched: Watched) -> None:
    empty = set()
    for query in panel_queries(FOLDER):
        if query.dashboard == SERVING.title:
            continue  # of a model that is served, not of a run
        if not finite(watched.window(query.filled(".+", "5s", "15s"))):
            empty.add((query.panel, query.legend))
    assert {legend for _, legend in empty} == EMPTY, empty


def test_every_metric_of_the_table_was_scraped(watched: Watched) -> None:
    missing = {name for m in METRICS for name in sample_names(m) if not watched.window(name)}
    assert not missing


def test_no_counter_fell_when_the_coordinator_died(watched: Watched) -> None:
    """Row 76: totals survive, so Prometheus sees no reset, which it would count as everything once more."""
    assert watched.folder.killed
    for metric in METRICS:
        if metric.kind == "gauge":
            continue
        for name in sample_names(metric):
            for line in watched.window(name):
                values = [value for _, value in line.points]
                assert values == sorted(values), f"{name} {line.labels}: {values}"
                assert line.labels["instance"] == f"127.0.0.1:{watched.port}"


def test_totals_are_those_of_the_run(watched: Watched) -> None:
    values = json.loads((watched.folder.path / VALUES_FILE).read_text())
    assert values["longtail_coordinator_restarts_total"] == [1.0]
    rows = map(json.loads, (watched.folder.path / "metrics.jsonl").read_text().splitlines())
    told = sum(row["kind"] == "step" for row in rows)
    assert told >= STEPS - 1, "the step that was under way may be lost between its training and its record"
    assert values["longtail_steps_total"] == [told]
    finished = [values[f"longtail_rollouts_finished_total|{reason}"][0] for reason in ("stop", "length")]
    assert sum(finished) == told * PROMPTS * GROUP
    summary = json.loads((watched.folder.path / "summary.json").read_text())
    drafting = values["longtail_idle_seconds_total|drafting"][0]
    # continuous, so also of the step that the dead coordinator had begun
    assert 0 < summary["drafting_seconds"] <= drafting + 0.05
    assert values["longtail_publish_bytes_total|policy"][0] > 1e6 * (STEPS / 2), "a policy has a million weights"


def test_the_endpoint_is_told_while_there_is_one(watched: Watched) -> None:
    assert watched.folder.seen["endpoints"] == [("127.0.0.1", watched.port)] * 2  # the second coordinator's is the same
    assert not (Path(watched.folder.path) / ENDPOINT_FILE).exists()


def test_slot_seconds_are_all_the_time_there_was(watched: Watched) -> None:
    """Each slot's roles sum to a second per second: nothing is counted twice, nothing is left out."""
    for line in watched.window('sum by (slot) (longtail_slot_seconds_total{slot=~"slot .*"})'):
        # while no coordinator was there, nobody counted and nothing was scraped, however long that took
        up = [(t1 - t0, v1 - v0) for (t0, v0), (t1, v1) in pairwise(line.points) if t1 - t0 < 1.5]
        spent, counted = (sum(column) for column in zip(*up, strict=True))
        assert spent > 5.0
        assert abs(counted - spent) < 3.0, line.points  # what is scraped was counted up to a tick ago
