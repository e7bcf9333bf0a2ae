"""A run that ends early and is started again under its id: the same rollouts and weights, bit for bit, as one that was
left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from deploy.local import run_local
from deploy.resuming import start_of
from services.config.schema import ClusterConfig
from services.core.checkpoints import whole_checkpoints
from services.core.errors import StopRequested
from services.core.types import ProgressView
from services.report.run_folder import RunFolder
from services.weights.checkpoint import STATE_FILE
from tests.deploy.tiny_run import make_model_folder, tiny_run

torch.set_num_threads(1)

STEPS = 4
UNTOLD = {"started_s", "finished_s"}  # clock times are no part of a rollout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def config_of(model: Path, runs: Path, run_id: str, **changes: dict[str, Any]) -> ClusterConfig:
    run = {"dir": str(runs), "id": run_id, "steps": STEPS, "eval_prompts": 4, "checkpoint_every": 1, "eval_every": 2}
    rest = {
        "drafter": {"training": {"when": "never"}, "micro_step_budget_s": 0.05, "pack_tokens": 256},
        "policy": {"threads": 1, "learning_rate": 3e-3, "zero_variance": "keep"},
        "placement": {"mode": "local"},
    }
    return tiny_run(model, runs, **{**rest, **changes, "run": {**run, **changes.get("run", {})}})


class Stopped(RunFolder):
    """A run folder whose driver is told to stop in the middle of step `at`."""

    at = 0

    def progress(self, view: ProgressView) -> None:
        super().progress(view)
        if view.phase == "rollout" and view.step == self.at and view.rollouts_running:
            raise StopRequested("in the middle of a step")


def go(config: ClusterConfig, stop_at: int | None = None) -> RunFolder:
    folder = RunFolder(config) if stop_at is None else Stopped(config)
    if isinstance(folder, Stopped):
        folder.at = stop_at or 0
    start = start_of(config, folder)
    if stop_at is None:
        run_local(config, folder, start=start)
    else:
        with pytest.raises(StopRequested):
            run_local(config, folder, start=start)
    return folder


def rollouts(path: Path) -> list[dict[str, Any]]:
    rows = [row for file in sorted((path / "rollouts").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    return [{k: v for k, v in row.items() if k not in UNTOLD} for row in rows]


def lines(path: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def last_state(path: Path) -> dict[str, torch.Tensor]:
    return load_file(whole_checkpoints(path / "checkpoints")[-1] / STATE_FILE)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go(config_of(model, tmp_path_factory.mktemp("runs"), "whole")).path


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(model: Path, whole: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path, "broken")
    for stop_at in (1, 3):
        go(config, stop_at)
    path = go(config).path

    assert rollouts(path) == rollouts(whole) and len(rollouts(whole)) == STEPS * 16
    mine, other = last_state(path), last_state(whole)
    assert mine.keys() == other.keys() and any(name.startswith("optimizer/exp_avg_sq/") for name in mine)
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    rows = {name: lines(p, "metrics.jsonl") for name, p in (("mine", path), ("whole", whole))}
    for kind, count in (("step", STEPS), ("evaluation", 3)):
        mine_rows, whole_rows = ([r for r in rows[name] if r["kind"] == kind] for name in ("mine", "whole"))
        assert [r["step"] for r in mine_rows] == [r["step"] for r in whole_rows] and len(mine_rows) == count
        assert [r["reward_mean"] for r in mine_rows] == [r["reward_mean"] for r in whole_rows]
    summary = json.loads((path / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["steps"] == STEPS and summary["rollouts"] == STEPS * 16
    events = lines(path, "events.jsonl")
    assert [e["kind"] for e in events].count("run_resumed") == 2
    times = [e["at_s"] for e in events] + [r["at_s"] for r in rows["mine"]]
    assert min(times) >= 0 and times[: len(events)] == sorted(times[: len(events)]), "the run's clock went back"
    starts = json.loads((path / "run.json").read_text())["starts"]
    assert [s["after_step"] for s in starts] == [0, 0, 2]
