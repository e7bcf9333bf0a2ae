"""A real run on Ray actors whose policy trainer, or one worker of it, is killed: another one goes on from the
checkpoint, and the rollout servers live on."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray

from deploy.cluster import run_on_ray
from deploy.resuming import go_back_in, start_of
from services.config.schema import ClusterConfig
from services.core.types import StepMetrics
from services.report.run_folder import RunFolder
from tests.actors.team_processes import team_workers
from tests.deploy.tiny_run import make_model_folder, tiny_run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, ROLLOUTS = 6, 16


@dataclass
class Killer:
    """SIGKILLs the policy trainer, of several workers one, when step 3 is told: in step 4, or a little later where the
    driver looks seldom."""

    workers: int
    handles: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    told: list[int] = field(default_factory=list)

    def learn(self, handles: dict[str, Any]) -> None:
        self.handles, self.processes = handles, self._ask(handles)

    def step(self, metrics: StepMetrics) -> None:
        if not self.after:
            self.told.append(metrics.policy_version)
            if metrics.step == 3:
                self.after = {"killed": self._victim()}
                os.kill(self.after["killed"], signal.SIGKILL)
        if metrics.step == 6 and len(self.after) == 1:
            self.after |= self._ask({n: h for n, h in self.handles.items() if n.startswith("rollout")})

    def _victim(self) -> int:
        if self.workers == 1:
            return self.processes["policy"]
        found = team_workers()
        assert len(found) == self.workers
        return found[-1]

    def _ask(self, handles: dict[str, Any]) -> dict[str, int]:
        return {name: ray.get(handle.process_id.remote(), timeout=60) for name, handle in handles.items()}


class Watched(RunFolder):
    killer: Killer

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        self.killer.step(metrics)


@dataclass
class Outcome:
    summary: dict[str, Any]
    folder: Path
    killer: Killer
    config: ClusterConfig

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture(
    scope="module",
    params=[(1, "split"), (2, "split"), (1, "colocated")],
    ids=["one process", "two workers", "one that shares the slots"],
)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    workers, policy = request.param
    place: Path = tmp_path_factory.mktemp("run")
    run = {"dir": str(place / "runs"), "steps": STEPS, "eval_prompts": 4, "compare_prompts": 0, "checkpoint_every": 2}
    config = tiny_run(
        make_model_folder(place),
        place,
        run=run,
        policy={"threads": 1, "zero_variance": "keep"},
        placement={"policy_workers": workers, "policy": policy},
        coordinator={"start_timeout_s": 300.0},
    )
    folder, killer = Watched(config), Killer(workers)
    folder.killer = killer
    start = start_of(config, folder)
    summary = run_on_ray(config, folder, on_start=killer.learn, start=start, go_back=go_back_in(folder))
    assert team_workers() == [], "all workers end with the run"
    yield Outcome(summary, folder.path, killer, config)


def test_every_step_is_there_once_with_its_rollouts(outcome: Outcome) -> None:
    assert outcome.killer.after["killed"] and outcome.summary["status"] == "finished"
    rows = [r for r in outcome.lines("metrics.jsonl") if r["kind"] == "step"]
    assert [r["step"] for r in rows] == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        found = pq.read_table(outcome.folder / "rollouts" / f"step_{step:05d}.parquet").to_pylist()
        assert len({(r["group_id"], r["index"]) for r in found}) == len(found) == ROLLOUTS
    assert outcome.summary["rollouts"] == STEPS * ROLLOUTS


def test_the_loss_and_the_step_gone_on_after_are_told(outcome: Outcome) -> None:
    told = {e["kind"]: e["message"] for e in outcome.lines("events.jsonl")}
    assert "since the last checkpoint died with it" in told["policy_lost"]
    assert re.search("goes on after step [24],", told["policy_replaced"]) and "coordinator_returned" in told
    assert "coordinator_lost" not in told


def test_versions_never_go_back_and_no_server_was_restarted(outcome: Outcome) -> None:
    """A version that went out with other weights must not go out again: a server would take the old for the new."""
    versions = [r["policy_version"] for r in outcome.lines("metrics.jsonl") if r["kind"] == "step"]
    assert outcome.killer.told == [1, 2, 3] and versions == sorted(set(versions))
    assert versions[-1] > STEPS, "the restored policy went out as a version of its own"
    for name in ("rollout-0", "rollout-1"):
        assert outcome.killer.after[name] == outcome.killer.processes[name]


def test_the_run_goes_on_with_another_number_of_workers(outcome: Outcome) -> None:
    """From a checkpoint of two workers by one, that is; the other way has a test without Ray."""
    if outcome.killer.workers == 1:
        pytest.skip("of the run with two")
    before = outcome.config.model_dump()
    before["placement"]["policy_workers"] = 1
    before["run"] |= {"id": outcome.folder.name, "steps": STEPS + 1}
    config = ClusterConfig.model_validate(before)
    folder = RunFolder(config)
    summary = run_on_ray(config, folder, start=start_of(config, folder), go_back=go_back_in(folder))
    assert summary["status"] == "finished"
    rows = [r for r in outcome.lines("metrics.jsonl") if r["kind"] == "step"]
    assert [r["step"] for r in rows] == list(range(1, STEPS + 2))
    versions = [r["policy_version"] for r in rows]
    assert versions == sorted(set(versions))
    assert any(e["kind"] == "run_resumed" and f"step {STEPS}" in e["message"] for e in outcome.lines("events.jsonl"))
