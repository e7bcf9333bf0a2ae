"""`longtail train` whole: what it prints, what it leaves, and how it stops."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from rich.console import Console

from deploy.cli_train import summary_table
from services.config.load import load_config
from tests.deploy.tiny_run import make_model_folder

ROOT = Path(__file__).resolve().parents[2]
LEFT_BEHIND = {"config.yaml", "run.json", "metrics.jsonl", "summary.json", "trace.json", "report.html"}


def model(folder: Path) -> str:
    return f"model.path={make_model_folder(folder)}"


def start(*args: str, cwd: Path, mark: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LONGTAIL_TEST_MARK": mark, "COLUMNS": "100"}
    run = [sys.executable, "-m", "deploy", "train", "pocket-tiny", *args]
    return subprocess.Popen(run, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def left_alive(mark: str) -> list[str]:
    """Processes started under the run, at any depth, by the mark in their environment; waits a moment for them."""
    give_up_s = time.monotonic() + 10
    while True:
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark.encode() in environ.read_bytes():
                    found.append((environ.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # it ended while we looked
        if not found or time.monotonic() > give_up_s:
            return found
        time.sleep(0.2)


def wait_for_step(runs: Path, process: subprocess.Popen[str], timeout_s: float) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not any('"step"' in f.read_text() for f in runs.glob("*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up_s, f"no step within {timeout_s} s"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_leaves_a_whole_folder_and_says_where(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    # random weights solve nothing: with zero_variance=keep the policy is updated all the same
    args = model(tmp_path), "placement.mode=local", "policy.zero_variance=keep", "run.id=mine", "--run-dir", "elsewhere"
    process = start(*args, cwd=tmp_path, mark=mark)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    report = re.search(r"^report: (.+)$", out, re.MULTILINE)
    assert report is not None, out
    folder = (tmp_path / report.group(1)).parent
    assert folder == tmp_path / "elsewhere" / "mine"
    assert {f.name for f in folder.iterdir()} >= LEFT_BEHIND
    config = load_config(folder / "config.yaml")
    assert config.placement.mode == "local" and config.run.dir == Path("elsewhere")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["greedy_mismatches"] == 0
    assert summary["rollouts"] == config.run.steps * config.rollout.prompts_per_step * config.rollout.group_size
    assert "held-out reward after" in out
    assert any(f.stat().st_size > 1000 for f in (folder / "tensorboard").glob("events.*"))
    assert left_alive(mark) == []

    before = {f: f.stat().st_mtime_ns for f in folder.rglob("*")}
    again = start(*args, cwd=tmp_path, mark=mark)
    out, err = again.communicate(timeout=150)
    assert again.returncode == 0 and "run mine is finished, all 2 steps of it: nothing to do" in out, err
    assert before == {f: f.stat().st_mtime_ns for f in folder.rglob("*")}, "a finished run was touched"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_terminated_run_leaves_no_process_and_a_valid_folder(tmp_path: Path) -> None:
    """What a container gets when it is stopped. Ray's own handler would abort; Ctrl-C is tested in tests/e2e."""
    mark = uuid.uuid4().hex
    process = start(model(tmp_path), "run.steps=500", cwd=tmp_path, mark=mark)
    wait_for_step(tmp_path / "runs", process, 150)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert left_alive(mark) == []
    (folder,) = (tmp_path / "runs").iterdir()
    assert {f.name for f in folder.iterdir()} >= LEFT_BEHIND
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    assert "report: " in out


@pytest.mark.parametrize("measured", [True, False])
def test_the_summary_tells_joules_when_they_were_measured(measured: bool) -> None:
    energy = {"rollout": 150.0, "idle": 1230.4, "lost": 0.0}
    found = {"energy_j": energy, "joules_per_step": 690.2} if measured else {"energy_j": None, "joules_per_step": None}
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table({"status": "finished", **found}))
    assert ("rollout 150, idle 1,230" in out.getvalue()) is measured
    assert ("690.200" in out.getvalue()) is measured and "finished" in out.getvalue()
