"""Ctrl-C in the middle of a run: exit code 130, a valid run folder, and no process left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from deploy.processes import still_running
from tests.deploy.tiny_run import make_model_folder, tiny_run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


def test_ctrl_c_leaves_a_valid_run_folder_and_no_process(tmp_path: Path) -> None:
    config = tiny_run(make_model_folder(tmp_path), tmp_path / "runs")
    preset = tmp_path / "long.yaml"
    run = {**config.model_dump(mode="json"), "run": {**config.run.model_dump(mode="json"), "steps": 10_000}}
    preset.write_text(yaml.safe_dump(run), encoding="utf-8")
    command = [sys.executable, "-m", "deploy", "train", str(preset), "--quiet"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    # A session of its own, as in a terminal: the signal goes to the whole foreground group, Ray's processes included.
    with _interrupts_heeded():
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
    try:
        _wait_for_steps(process, tmp_path / "runs", steps=2)
        started = psutil.Process(process.pid).children(recursive=True)
        assert started
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert not still_running(started)
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "stopped" and summary["steps"] >= 2
    assert (folder / "report.html").stat().st_size > 1000


@contextmanager
def _interrupts_heeded() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and their children inherit that: these tests' too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _wait_for_steps(process: subprocess.Popen[str], runs: Path, steps: int) -> None:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        for metrics in runs.glob("*/metrics.jsonl"):
            if sum('"step"' in line and "policy_loss" in line for line in metrics.read_text().splitlines()) >= steps:
                return
        time.sleep(0.3)
    raise AssertionError(f"no {steps} steps within 150 s")
