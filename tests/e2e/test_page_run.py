"""`longtail train` on Ray actors and `longtail page` beside it, two processes that share a folder: a run is paused,
given another strategy, resumed and stopped over HTTP, and the page outlives the run's Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deploy.processes import end_processes, still_running
from tests.deploy.page_process import TOKEN, served
from tests.deploy.tiny_run import make_model_folder, tiny_run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def post(url: str, body: Any = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else b"", headers)
    try:
        with urllib.request.urlopen(request, timeout=150) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def wait(url: str, true: Callable[[Any], Any], process: subprocess.Popen[str] | None, seconds: float = 150) -> Any:
    give_up = time.monotonic() + seconds
    while not true(answer := get(url)):
        assert process is None or process.poll() is None, "the run ended"
        assert time.monotonic() < give_up, f"still {answer}"
        time.sleep(0.3)
    return answer


def test_a_run_on_ray_is_controlled_over_http(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    config = tiny_run(make_model_folder(tmp_path), runs, run={"dir": str(runs), "steps": 10_000, "eval_prompts": 0},
                      coordinator={"start_timeout_s": 300.0, "call_timeout_s": 120.0})  # fmt: skip
    preset = tmp_path / "long.yaml"
    preset.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    command = [sys.executable, "-m", "deploy", "train", str(preset), "--quiet"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    log = open(tmp_path / "log", "w+", encoding="utf-8")  # noqa: SIM115
    process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment, start_new_session=True)
    try:
        with served(runs) as server:
            api = f"{server.url}/api/v1/runs"
            (entry,) = wait(api, lambda a: a["runs"], process)["runs"]
            run = f"{api}/{entry['run_id']}"
            wait(run, lambda a: a["num_steps_done"] >= 2, process, 300)
            started = psutil.Process(process.pid).children(recursive=True)
            began = time.monotonic()
            assert post(f"{run}/control/pause")[0] == 202
            print(f"asking took {time.monotonic() - began:.1f} s")
            paused = wait(run, lambda a: a["status"] == "paused", process)
            assert set(paused["progress"]["slots"].values()) == {"idle"}
            assert post(f"{run}/control/selector", {"strategy": "off"})[0] == 202
            status, refused = post(f"{run}/control/selector", {"strategy": "eagle_9_1_10"})
            assert status == 409 and "one of eagle_2_1_3, off" in refused["detail"]
            wait(run, lambda a: a["progress"]["control"]["forced"] == "off", process)
            assert get(run)["num_steps_done"] == paused["num_steps_done"]
            assert post(f"{run}/control/resume")[0] == 202
            done = wait(run, lambda a: a["num_steps_done"] > paused["num_steps_done"] + 1, process)["num_steps_done"]
            last = get(f"{run}/steps?since={done - 1}")["items"][0]
            assert set(last["steps_by_strategy"]) == {"off"}
            assert post(f"{run}/control/stop")[0] == 202
            assert process.wait(120) == 130
            ended = wait(run, lambda a: a["status"] == "stopped", None)
            assert ended["has_report"] and not still_running(started)
            kinds = [e["kind"] for e in get(f"{run}/events")["items"]]
            assert [k for k in kinds if k in ("paused", "resumed", "strategy_forced")] == [
                "paused", "strategy_forced", "resumed",
            ]  # fmt: skip
            status, gone = post(f"{run}/control/pause")  # its Ray is gone: a clear answer, and the page lives on
            assert status in (503, 504), gone
            assert get(run)["status"] == "stopped" and server.process.poll() is None
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        end_processes(left)
        log.close()
    assert process.returncode == 130, (tmp_path / "log").read_text()
