"""A run that ends early and is started again under its id: the same rollouts and weights, bit for bit, as one that was
left alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from deploy.cli_shared import training_config
from deploy.cli_train import train
from deploy.local import run_local
from deploy.resuming import start_of
from deploy.uploading import uploading
from services.config.schema import ClusterConfig
from services.core.checkpoints import CheckpointPlan, step_of, whole_checkpoints
from services.core.errors import ConfigError, DataError, NothingTrainedError, StopRequested
from services.core.types import ProgressView
from services.policy.service import build_policy_service
from services.report.remote import RemoteRun
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
        if view.phase == "reward" and view.step == self.at:  # the rollouts are there, the policy is not trained yet
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


def test_a_run_whose_machine_is_gone_goes_on_from_its_url(model: Path, whole: Path, tmp_path: Path) -> None:
    """The folder is lost in the middle of step 3; another machine has the URL and nothing else."""
    url = f"file://{tmp_path}/store"
    config = config_of(model, tmp_path / "first", "broken", run={"checkpoint_url": url})
    folder = Stopped(config)
    folder.at = 3
    start = start_of(config, folder)
    with pytest.raises(StopRequested), uploading(config, folder, start, print):
        run_local(config, folder, start=start)
    shutil.rmtree(tmp_path / "first")

    train(training_config(None, [], tmp_path / "second", f"{url}/broken"), quiet=True)
    path = tmp_path / "second" / "broken"
    assert rollouts(path) == rollouts(whole)
    mine, other = last_state(path), last_state(whole)
    assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)
    assert [s["after_step"] for s in json.loads((path / "run.json").read_text())["starts"]] == [0, 2]
    assert RemoteRun(url, "broken").steps()[-1] == STEPS

    retried = config_of(model, tmp_path / "third", "broken", run={"checkpoint_url": url, "steps": STEPS + 1})
    train(retried, quiet=True)  # the first machine's command, as a job's retry has it
    assert rollouts(tmp_path / "third" / "broken")[: STEPS * 16] == rollouts(whole)
    assert RemoteRun(url, "broken").steps()[-1] == STEPS + 1


def test_a_run_that_trained_nothing_does_not_end_well(model: Path, tmp_path: Path) -> None:
    """Row 37: whoever started it looks at the exit code."""
    policy = {"threads": 1, "zero_variance": "skip"}
    reward = {"answer_marker": "no response has this", "verifier": "exact"}
    config = config_of(model, tmp_path, "vain", policy=policy, reward=reward, run={"steps": 1, "eval_prompts": 0})
    with pytest.raises(NothingTrainedError, match="did its 1 steps, but the policy is as it was") as caught:
        train(config, quiet=True)
    assert caught.value.exit_code not in (0, 1, 2)
    assert json.loads((tmp_path / "vain" / "summary.json").read_text())["status"] == "finished"


def test_a_longer_run_goes_on_where_the_shorter_one_ended(model: Path, whole: Path, tmp_path: Path) -> None:
    """It has no other first half for that. The drafter's own random numbers and the learning rate go by the step."""
    go(config_of(model, tmp_path, "grown", run={"steps": 2}))
    path = go(config_of(model, tmp_path, "grown")).path
    assert rollouts(path) == rollouts(whole)
    assert [r["step"] for r in lines(path, "metrics.jsonl") if r["kind"] == "evaluation"] == [0, 2, 4]


def test_online_training_of_the_drafter_goes_on_from_its_state(model: Path, tmp_path: Path) -> None:
    """It depends on the clock, so tokens differ; nothing is lost, and what it learned is not learned again."""
    drafter = {"training": {"when": "always"}, "micro_step_budget_s": 0.05, "pack_tokens": 256, "round_s": 0.2}
    # One group a step: however fast the machine is, one of the two slots is idle as long as the other generates.
    config = config_of(model, tmp_path, "online", drafter=drafter, rollout={"prompts_per_step": 1, "group_size": 16})
    path = go(config, stop_at=4).path
    place = whole_checkpoints(path / "checkpoints")[-1]
    live = json.loads((place / "manifest.json").read_text())["drafters"]["drafter/live"]
    assert step_of(place) == 3 and live["total_steps"] > 0 and live["updates"] > 0
    go(config)
    rows = [r for r in lines(path, "metrics.jsonl") if r["kind"] == "step"]
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    ids = [(r["step"], r["group_id"], r["index"]) for r in rollouts(path)]
    assert len(ids) == len(set(ids)) == STEPS * 16
    versions = [r["drafter_version"] for r in rows]
    assert versions == sorted(versions), "the drafter's version went back"
    last = json.loads((whole_checkpoints(path / "checkpoints")[-1] / "manifest.json").read_text())
    assert last["drafters"]["drafter/live"]["total_steps"] >= live["total_steps"]


def test_checkpoints_ahead_of_the_records_are_not_gone_on_from(model: Path, whole: Path, tmp_path: Path) -> None:
    """The driver writes the records, the policy trainer the checkpoints; the driver may die in between."""
    path = shutil.copytree(whole, tmp_path / "whole")
    (path / "rollouts" / "step_00004.parquet").unlink()
    (path / "summary.json").unlink()
    folder = RunFolder(config_of(model, tmp_path, "whole"))
    start = start_of(config_of(model, tmp_path, "whole"), folder)
    assert start.checkpoints is not None and start.checkpoints.start is not None and start.takeover is not None
    assert step_of(start.checkpoints.start) == 3 and len(start.takeover.steps) == 3
    assert [step_of(p) for p in whole_checkpoints(path / "checkpoints")] == [3]
    folder.close()


@pytest.mark.parametrize("damage", ["state", "manifest", "model"])
def test_a_damaged_checkpoint_is_told_with_the_remedy(whole: Path, model: Path, tmp_path: Path, damage: str) -> None:
    path = shutil.copytree(whole, tmp_path / "whole")
    place = whole_checkpoints(path / "checkpoints")[-1]
    if damage == "state":
        data = bytearray((place / STATE_FILE).read_bytes())
        data[-1] ^= 1
        (place / STATE_FILE).write_bytes(data)
    elif damage == "manifest":
        (place / "manifest.json").write_text("{")
    else:
        manifest = json.loads((place / "manifest.json").read_text())
        (place / "manifest.json").write_text(json.dumps(manifest | {"model": {"hidden_size": 7}}))
    plan = CheckpointPlan(place.parent, place)
    remedy = r"another model.*another run\.id" if damage == "model" else "to go on from the"
    with pytest.raises(DataError, match=remedy):
        build_policy_service(config_of(model, tmp_path, "whole"), checkpoints=plan)


def test_a_run_folder_that_the_trainer_does_not_see_is_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not see the run folder .*run\.dir.*run\.checkpoint_every=0"):
        build_policy_service(
            config_of(model, tmp_path, "x"), checkpoints=CheckpointPlan(tmp_path / "nowhere" / "checkpoints")
        )
