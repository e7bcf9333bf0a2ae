"""`longtail submit` on a cluster whose head is killed and started again, with Redis to remember the cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.run_folders import WatchedRun
from tests.e2e.two_nodes import ROOT, TwoNodes, reason_to_skip, two_nodes, wait_until

SKIP = reason_to_skip("redis-server")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(SKIP is not None, reason=str(SKIP)),
]
SUBMIT = [sys.executable, "-m", "deploy", "submit", "pocket-tiny"]
PLACE = (
    "placement.role_labels=true", "placement.strategy=STRICT_SPREAD", "placement.address=auto",
    "placement.gpus_per_slot=1", "placement.policy_gpus=1", "coordinator.start_timeout_s=200",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    with two_nodes(redis=True) as nodes:
        yield nodes


def jobs_of(cluster: TwoNodes, run_id: str) -> list[str]:
    code = (
        "from ray.job_submission import JobSubmissionClient; import json; from deploy.jobs import attempts; "
        f"print(json.dumps([j.status.value for j in attempts(JobSubmissionClient(), {run_id!r})]))"
    )
    done = cluster.run([sys.executable, "-c", code], 60)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_job_that_fails_is_run_once_and_its_exit_code_returned(cluster: TwoNodes, tmp_path: Path) -> None:
    """Pitfall 70."""
    (tmp_path / "runs").write_text("a file where the folder should be")
    done = cluster.run([*SUBMIT, f"run.dir={tmp_path / 'runs'}", "--run-id", "mistaken"], 200)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "uploading " in done.stdout and "cannot create" in done.stdout and "job mistaken failed" in done.stderr
    assert jobs_of(cluster, "mistaken") == ["FAILED"]


def test_a_head_that_is_killed_and_restarted_costs_the_run_nothing_but_time(cluster: TwoNodes, tmp_path: Path) -> None:
    """Pitfall 71: the job goes with the head; submit sends it again and the run goes on from its checkpoint."""
    log = tmp_path / "submit.log"
    settings = ("run.steps=8", "run.checkpoint_every=1", "rollout.prompts_per_step=8", f"run.dir={tmp_path}")
    with open(log, "wb") as out:
        process = subprocess.Popen(
            cluster.network.command("head", [*SUBMIT, *PLACE, *settings, "--run-id", "lasting"]),
            cwd=ROOT, env={**os.environ, **cluster.environment}, stdout=out, stderr=out,
        )  # fmt: skip
    run = WatchedRun(tmp_path / "lasting", lambda: process.poll() is None, log)
    try:
        wait_until("three steps", lambda: run.steps() >= 3, 300)
    except TimeoutError as error:
        raise AssertionError(f"{error}: {log.read_text()}") from error
    cluster.head.kill()
    cluster.head.start()
    assert process.wait(timeout=400) == 0, log.read_text() + cluster.logs()

    told = log.read_text()
    assert "lost the connection to the cluster" in told and "run lasting is submitted again" in told
    summary = json.loads((tmp_path / "lasting" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["rollouts"]) == ("finished", 8, 8 * 8 * 2)
    assert run.step_numbers() == list(range(1, 9)), "no step is missing and none is counted twice"
    for file in sorted((tmp_path / "lasting" / "rollouts").glob("*.parquet")):
        table = pq.read_table(file)
        ids = set(zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True))
        assert len(ids) == table.num_rows == 16
    assert "run_resumed" in run.kinds()
