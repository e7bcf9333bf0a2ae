"""Real runs on Ray actors whose policies go over direct connections (gloo here): a server dies, or none can connect."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from deploy.cluster import run_on_ray
from services.core.types import ProgressView
from tests.deploy.tiny_run import generates, make_model_folder, tiny_run
from tests.services.coordinator.world import Recorder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

# Long phases, see generates().
STEPS, PROMPTS, GROUP = 4, 24, 4


@pytest.mark.parametrize("connect_timeout_s", [20.0, 0.001])
def test_a_killed_server_gets_the_policy_again_and_one_without_a_connection_gets_a_copy(
    tmp_path: Path, connect_timeout_s: float
) -> None:
    config = tiny_run(
        make_model_folder(tmp_path),
        tmp_path,
        rollout={
            "num_servers": 2, "group_size": GROUP, "prompts_per_step": PROMPTS, "advance_budget_s": 0.05,
            "engine": {"type": "native", "max_running": GROUP, "max_len": 192}, "sampling": {"max_tokens": 120},
        },
        weights={"transport": "collective", "part_bytes": 20_000, "connect_timeout_s": connect_timeout_s},
        coordinator={"start_timeout_s": 240.0},
        run={"dir": str(tmp_path), "steps": STEPS, "eval_prompts": 4, "compare_prompts": 2, "compare_repeats": 1},
    )  # fmt: skip
    processes: dict[str, int] = {}
    killed: list[int] = []

    def on_start(handles: dict[str, Any]) -> None:
        processes.update({name: ray.get(h.process_id.remote(), timeout=60) for name, h in handles.items()})

    def watch(view: ProgressView) -> None:
        if generates(view) and view.step >= 2 and not killed:
            killed.append(processes["rollout-1"])
            os.kill(killed[0], signal.SIGKILL)

    observer = Recorder()
    observer.watch = watch
    summary = run_on_ray(config, observer, on_start=on_start)
    assert summary["status"] == "finished" and killed
    assert summary["rollouts"] == STEPS * PROMPTS * GROUP and summary["greedy_mismatches"] == 0
    assert all(m.logprob_gap < 1e-3 for m in observer.steps), "the servers have the trainer's very weights"
    told = [e for e in observer.events if e.kind == "transfer_failed"]
    if connect_timeout_s > 1:
        assert not told, told
    else:
        assert {e.subject for e in told} == {"rollout-0", "rollout-1"}
        assert all(e.message.endswith("through the object store") for e in told), told
    assert "slot_lost" in {e.kind for e in observer.events}
