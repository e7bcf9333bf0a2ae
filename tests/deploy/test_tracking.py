"""Real trackers: TensorBoard's files are read back; wandb (offline) and mlflow (a folder) where they are installed."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.tracking import TENSORBOARD_FOLDER, Tracking, scalars, start_tracking
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError
from services.core.types import EvalResult, RunEvent, StepMetrics
from tests.services.report.conftest import make_metrics


@pytest.fixture
def told() -> list[RunEvent]:
    return []


def config(*trackers: str) -> ClusterConfig:
    return ClusterConfig.model_validate({"run": {"tracking": trackers}})


def steps(*numbers: int, reward: float = 0.5) -> list[StepMetrics]:
    rng = random.Random(0)
    return [replace(make_metrics(rng, n, float(n), 1.0, 0.5, 0.2), reward_mean=reward + n) for n in numbers]


def test_only_finite_numbers_are_scalars() -> None:
    record = {"a": 1, "b": 2.5, "c": None, "d": math.nan, "e": math.inf, "f": True, "g": "x", "h": (1, 2),
              "i": {"off": 3, "why": "x"}}  # fmt: skip
    assert scalars("step", record) == {"step/a": 1.0, "step/b": 2.5, "step/i/off": 3.0}


def events(run_dir: Path) -> dict[str, dict[int, float]]:
    """As TensorBoard shows them: a file may purge steps from one on that earlier files hold."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = defaultdict(dict)
    for file in sorted((run_dir / TENSORBOARD_FOLDER).glob("events.*"), key=lambda f: (f.stat().st_mtime_ns, f.name)):
        data, at = file.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            if event.HasField("session_log"):
                for series in found.values():
                    for step in [s for s in series if s >= event.step]:
                        del series[step]
            for value in event.summary.value:
                found[value.tag][event.step] = value.simple_value
    return found


def test_tensorboard_has_every_step_and_evaluation(tmp_path: Path, told: list[RunEvent]) -> None:
    tracking = start_tracking(config("tensorboard"), tmp_path, 0, told.append)
    for metrics in steps(1, 2, 3):
        tracking.step(metrics)
        tracking.rollouts(1, ())
    tracking.evaluation(EvalResult(3, 1.0, 8, 8, 0.25, 0.25))
    tracking.finish({"status": "finished"})
    found = events(tmp_path)
    assert found["step/reward_mean"] == {1: 1.5, 2: 2.5, 3: 3.5} and found["heldout/reward_mean"] == {3: 0.25}
    assert any(name.startswith("step/steps_by_strategy/") for name in found)


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("again", [3, 4])
def test_steps_that_are_done_again_replace_what_was_told_of_them(
    tmp_path: Path, told: list[RunEvent], restarted: bool, again: int
) -> None:
    """Also by the next driver, whose run went on from an earlier checkpoint, and the last one alone."""
    tracking = start_tracking(config("tensorboard"), tmp_path, 0, told.append)
    for metrics in steps(1, 2, 3, 4):
        tracking.step(metrics)
    tracking.evaluation(EvalResult(4, 1.0, 8, 8, 0.25, 0.25))
    if restarted:
        tracking = start_tracking(config("tensorboard"), tmp_path, again - 1, told.append)
    for metrics in steps(again, reward=10.0):
        tracking.step(metrics)
    tracking.finish({"status": "stopped"})
    found = events(tmp_path)
    wanted = {n: n + 0.5 for n in range(1, again)} | {again: again + 10.0}
    assert found["step/reward_mean"] == wanted and not found["heldout/reward_mean"]


class Failing:
    """A tracker whose service is gone after a while."""

    errors = (ConnectionError,)

    def __init__(self, good: int) -> None:
        self.good, self.logged, self.closed = good, list[int](), False

    def log(self, values: Mapping[str, float], step: int) -> None:
        if len(self.logged) == self.good:
            raise ConnectionError("no answer\nfrom 10.0.0.1")
        self.logged.append(step)

    def close(self, status: str) -> None:
        self.closed = True
        if self.good > 3:
            raise ConnectionError("")


def test_a_tracker_that_fails_on_the_way_is_told_and_the_others_go_on(told: list[RunEvent]) -> None:
    first, second = Failing(1), Failing(4)
    tracking = Tracking({"first": first, "second": second}, told.append)
    for metrics in steps(1, 2, 3):
        tracking.step(metrics)
    tracking.finish({"status": "finished"})
    assert first.logged == [1] and not first.closed and second.logged == [1, 2, 3] and second.closed
    assert [(e.kind, e.subject, e.at_s) for e in told] == [
        ("tracker_lost", "first", 2.0),
        ("tracker_lost", "second", 3.0),
    ]
    assert told[0].message == "no answer; nothing more is logged there, the run folder has everything"
    assert told[1].message.startswith("ConnectionError; ")


def test_a_package_that_is_not_there_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[RunEvent]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'longtail-rl\[wandb\]'"):
        start_tracking(config("wandb"), tmp_path, 0, told.append)


def play(trackers: str, tmp_path: Path) -> None:
    run_dir, told = tmp_path / "a-run", list[RunEvent]()
    run_dir.mkdir(exist_ok=True)
    for after, numbers in ((0, (1, 2)), (1, (2, 3))):
        tracking = start_tracking(config(trackers), run_dir, after, told.append)
        for metrics in steps(*numbers, reward=10.0 * after):
            tracking.step(metrics)
        tracking.finish({"status": "finished" if after else "failed"})
    assert not told


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    play("mlflow", tmp_path)
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FINISHED" and run.info.run_name == "a-run"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "step/reward_mean")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 2.0), (2, 12.0), (3, 13.0)]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    play("wandb", tmp_path)
    files = list((tmp_path / "a-run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and all(b"step/reward_mean" in f.read_bytes() for f in files)
    wandb.teardown()


def test_services_that_do_not_take_the_run_are_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[RunEvent]
) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"mlflow, which does not take the run: .*: set MLFLOW_TRACKING_URI"):
        start_tracking(config("mlflow"), tmp_path, 0, told.append)
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    with pytest.raises(ConfigError, match=r"wandb, which does not take the run: .*WANDB_MODE=offline"):
        start_tracking(config("wandb"), tmp_path, 0, told.append)
