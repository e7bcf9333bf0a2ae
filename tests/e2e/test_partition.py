"""`ray job submit` on a cluster of two machines, one of which is cut off in the middle of a step and comes back."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.gate import CLOSED, HELD_S
from tests.e2e.run_folders import WatchedRun
from tests.e2e.two_nodes import BIN, DASHBOARD, ROOT, TwoNodes, reason_to_skip, two_nodes, wait_until

SKIP = reason_to_skip()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(560),
    pytest.mark.skipif(SKIP is not None, reason=str(SKIP)),
]

STEPS, PROMPTS, GROUP = 6, 80, 4  # a phase of some seconds, so that the cut falls into it
SETTINGS = (
    "placement.address=auto", "placement.role_labels=true", "placement.strategy=STRICT_SPREAD",
    "placement.gpus_per_slot=1", "placement.policy_gpus=1", "coordinator.start_timeout_s=150",
    f"run.steps={STEPS}", f"rollout.prompts_per_step={PROMPTS}", f"rollout.group_size={GROUP}",
    "rollout.advance_budget_s=0.1", "data.source.size=256", "run.eval_prompts=8",
    "reward.verifier=function", "reward.function=tests.e2e.gate.score", f"reward.timeout_s={HELD_S}",
)  # fmt: skip


@dataclass
class Outcome:
    """`cut_at_step`: steps that were done when the worker's cable was cut."""

    exit_code: int
    log: str
    folder: Path
    cut_at_step: int
    lost_slot: str

    def rows(self, file: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / file).read_text(encoding="utf-8").splitlines()]


class Job:
    """`ray job submit`, which follows the job's log to its end."""

    def __init__(self, cluster: TwoNodes, submission_id: str, command: list[str], variables: dict[str, str]) -> None:
        self.log = cluster.folder / f"{submission_id}.log"
        submit = [str(BIN / "ray"), "job", "submit", "--address", DASHBOARD, "--submission-id", submission_id]
        submit += ["--runtime-env-json", json.dumps({"env_vars": variables})]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                cluster.network.command("head", [*submit, "--working-dir", ".", "--", *command]),
                cwd=ROOT, env={**os.environ, **cluster.environment}, stdout=log, stderr=log,
            )  # fmt: skip

    def ended(self) -> bool:
        return self.process.poll() is not None


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """The step in which the cable is cut lasts until the machine is back, however fast or slow this one is."""
    runs, closed = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("gate") / "closed"
    train = ["longtail", "train", "pocket-tiny", "--quiet", *SETTINGS, f"run.dir={runs}", "run.id=partition"]
    with two_nodes() as cluster:
        job = Job(cluster, "partition", train, {CLOSED: str(closed)})
        run = WatchedRun(runs / "partition", lambda: not job.ended(), job.log)
        wait_until("two steps", lambda: run.steps() >= 2, 200)
        closed.touch()
        time.sleep(1.0)  # into the rollout phase of the next one
        done = run.steps()
        cluster.network.cut("worker")
        wait_until("the loss of a slot", lambda: bool(run.subjects("slot_lost")), 120)
        lost = run.subjects("slot_lost")[0]
        cluster.network.heal("worker")
        cluster.worker.restart_once_ended(120)
        wait_until("its return", lambda: lost in run.subjects("slot_returned"), 120)
        closed.unlink()
        job.process.wait(timeout=300)
        yield Outcome(job.process.returncode, job.log.read_text(), runs / "partition", done, lost)


def test_the_job_succeeds_with_every_rollout_once(outcome: Outcome) -> None:
    assert outcome.exit_code == 0 and "Job 'partition' succeeded" in outcome.log, outcome.log
    summary = json.loads((outcome.folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    assert summary["rollouts"] == STEPS * PROMPTS * GROUP
    steps = [row["step"] for row in outcome.rows("metrics.jsonl") if row["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1)), "each step is recorded once, in order"
    for file in sorted((outcome.folder / "rollouts").glob("*.parquet")):
        table = pq.read_table(file)
        ids = list(zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True))
        assert len(ids) == len(set(ids)) == PROMPTS * GROUP, file.name


def test_the_slot_on_the_lost_machine_is_lost_comes_back_and_works_again(outcome: Outcome) -> None:
    spans = [s for s in outcome.rows("spans.jsonl") if s["slot"] == outcome.lost_slot.replace("rollout-", "slot ")]
    assert any(s["role"] == "lost" for s in spans)
    last = pq.read_table(outcome.folder / "rollouts" / f"step_{STEPS:05d}.parquet")
    assert outcome.lost_slot in last["server"].to_pylist()


def test_the_step_under_way_was_finished_by_the_other_machine(outcome: Outcome) -> None:
    table = pq.read_table(outcome.folder / "rollouts" / f"step_{outcome.cut_at_step + 1:05d}.parquet")
    other = {"rollout-0": "rollout-1", "rollout-1": "rollout-0"}[outcome.lost_slot]
    assert other in table["server"].to_pylist()


def test_speculation_stays_lossless(outcome: Outcome) -> None:
    summary = json.loads((outcome.folder / "summary.json").read_text())
    assert summary["greedy_mismatches"] == 0 and summary["greedy_checked"] == 2
