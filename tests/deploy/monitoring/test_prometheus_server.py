"""Starting Prometheus: what it is told to scrape, and what is said when it cannot start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deploy.cli_monitor import data_folder, monitor
from deploy.monitoring.prometheus_server import (
    RAY_INTERVAL_S,
    ServerOptions,
    prometheus_running,
    server_config,
    write_targets,
)
from deploy.monitoring.queries import PrometheusApi
from services.core.errors import ConfigError, RequestError
from services.report.run_folder import ENDPOINT_FILE

ROOT = Path(__file__).resolve().parents[3]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_dir(runs: Path, name: str, target: str | None) -> Path:
    folder = runs / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    if target is not None:
        (folder / ENDPOINT_FILE).write_text(json.dumps([{"targets": [target]}]))
    return folder


def test_runs_that_serve_metrics_are_found(tmp_path: Path) -> None:
    one = run_dir(tmp_path, "a", "127.0.0.1:1001")
    run_dir(tmp_path, "b", "127.0.0.1:1002")
    run_dir(tmp_path, "ended", None)
    assert write_targets(tmp_path, tmp_path) == 2
    assert json.loads((tmp_path / "targets.json").read_text())[1] == {"targets": ["127.0.0.1:1002"]}
    assert write_targets(one, tmp_path) == 1
    assert data_folder(one) == data_folder(tmp_path) == tmp_path / ".prometheus"


def test_ray_is_never_scraped_more_often_than_it_has_news(tmp_path: Path) -> None:
    """Row 75."""
    jobs = server_config(ServerOptions(9090, 2, tmp_path, tmp_path / "ray.json"))["scrape_configs"]
    assert {j["job_name"]: j["scrape_interval"] for j in jobs} == {"longtail": "2s", "ray": f"{RAY_INTERVAL_S}s"}
    assert RAY_INTERVAL_S >= 15


def test_prometheus_accepts_the_configuration(tmp_path: Path) -> None:
    write_targets(tmp_path, tmp_path)
    file = tmp_path / "prometheus.yml"
    file.write_text(json.dumps(server_config(ServerOptions(9090, 5, tmp_path, tmp_path / "targets.json"))))
    done = subprocess.run(
        ["promtool", "check", "config", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_folder_a_taken_port_and_a_missing_prometheus_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        monitor(tmp_path / "nowhere", ServerOptions(9090, 5, tmp_path / "data"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            monitor(tmp_path, ServerOptions(port, 5, tmp_path / "data"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install prometheus"):
        monitor(tmp_path, ServerOptions(free_port(), 5, tmp_path / "data"))


def test_a_query_that_prometheus_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    write_targets(tmp_path, tmp_path)
    with prometheus_running(ServerOptions(free_port(), 5, tmp_path)) as process:
        api = PrometheusApi(f"http://127.0.0.1:{process.args[-1].rpartition(':')[2]}")  # type: ignore[index]
        assert api.query("vector(3)")[0].points[0][1] == 3.0
        with pytest.raises(RequestError, match="parse error"):
            api.query("sum(")
    with pytest.raises(RequestError, match="no answer"):
        api.query("vector(3)")


class OneMetric(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'longtail_step{run_id="r"} 7\n')

    def log_message(self, *args: object) -> None: ...


def test_monitor_watches_a_run_that_begins_later_and_leaves_nothing(tmp_path: Path) -> None:
    serving = HTTPServer(("127.0.0.1", 0), OneMetric)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    port = free_port()
    command = [sys.executable, "-m", "deploy", "monitor", str(tmp_path), "--port", str(port), "--interval", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(3)]
    assert f"http://127.0.0.1:{port}" in told[0] and "dashboards" in told[1] and "waiting" in told[2]
    run_dir(tmp_path, "late", f"127.0.0.1:{serving.server_port}")
    assert "1 run serves" in process.stdout.readline()
    api, found = PrometheusApi(f"http://127.0.0.1:{port}"), []
    for _ in range(60):
        found = api.query("longtail_step")
        if found:
            break
        threading.Event().wait(0.5)
    assert found and found[0].labels["job"] == "longtail"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 130
    serving.shutdown()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=120)
