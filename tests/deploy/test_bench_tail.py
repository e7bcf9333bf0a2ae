from __future__ import annotations

import time
from pathlib import Path

import pytest

from deploy.bench_tail import run_bench
from deploy.inprocess import LocalRolloutClient, LocalService
from deploy.side_by_side import MICRO_STEP_S, SideBySideHost, single_threaded
from services.config.schema import ClusterConfig
from tests.deploy.tiny_run import make_model_folder, tiny_run


def test_the_bench_frees_slots_and_changes_no_response(tmp_path: Path) -> None:
    config = tiny_run(
        make_model_folder(tmp_path),
        tmp_path,
        rollout={"consolidate": {"max_delay": 1.0, "min_freed_s": 0.0, "worth": 1.0}, "advance_budget_s": 0.01},
        drafter={"micro_step_budget_s": 0.01, "pack_tokens": 256},
    )
    found = run_bench(config, 1)
    assert found["on"]["moves"] > 0 == found["off"]["moves"]
    assert found["on"]["rollout_s"] > 0 and found["rollout_time_ratio"] > 0
    assert found["equal_lengths"] > 0.9, "near ties apart, both generate the same"


class Busy:
    """Takes processor time."""

    def submit(self, work: object, epoch: int) -> float:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        return end


def test_calls_lie_side_by_side_and_one_behind_the_other_at_one_service() -> None:
    host = SideBySideHost()
    clients = [LocalRolloutClient(LocalService(f"rollout-{i}", Busy, host)) for i in range(2)]
    first, second, other = clients[0].submit([], 0), clients[0].submit([], 0), clients[1].submit([], 0)
    assert host.wait([second], 0.01) == [] and host.clock() == pytest.approx(0.01)
    calls, seen = [first, second, other], []
    while calls:
        ready = host.wait(calls, 10.0)
        seen.append((host.clock(), len(ready)))
        calls = [c for c in calls if c not in ready]
    assert seen[0][0] == pytest.approx(0.05, abs=0.02) and seen[-1][0] == pytest.approx(0.1, abs=0.03)
    assert len(seen) == 3 and host.wait([], 2.0) == [] and host.clock() == pytest.approx(seen[-1][0] + 2.0)


def test_side_by_side_a_trainer_answers_after_about_a_micro_step() -> None:
    """A call that would interrupt it waits in its queue here: a whole second would be laid on the rollout's end."""
    config = single_threaded(ClusterConfig())
    assert config.drafter.micro_step_budget_s == MICRO_STEP_S < ClusterConfig().drafter.micro_step_budget_s
    shorter = ClusterConfig.model_validate({"drafter": {"micro_step_budget_s": 0.01}})
    assert single_threaded(shorter).drafter.micro_step_budget_s == 0.01
