"""A whole GRPO run on one GPU: two SGLang servers, their drafter trainers and the policy trainer share it.

Steps 1-20 undisturbed: a drafter and a policy load every step, no restart, no leak. Then one engine is killed, and the
run goes on for longer than an engine takes to start.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from deploy.cluster import run_on_ray
from services.config.load import load_config
from services.core.types import ProgressView
from tests.gpu.cases import PRESETS
from tests.gpu.watching import CALM_STEPS, SETTLED, MemoryWatcher

pytestmark = [pytest.mark.ray, pytest.mark.timeout(580)]

STEPS, KILL_AT = 40, 22


@dataclass
class Watcher(MemoryWatcher):
    """Kills an engine's scheduler process once."""

    processes: dict[str, int] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)

    def learn(self, handles: dict[str, Any]) -> None:
        self.processes = {name: ray.get(h.process_id.remote(), timeout=60) for name, h in handles.items()}

    def look(self, view: ProgressView) -> None:
        if view.step >= KILL_AT and view.phase == "rollout" and view.rollouts_running and not self.killed:
            for process in psutil.Process(self.processes["rollout-1"]).children(recursive=True):
                if "scheduler" in " ".join(process.cmdline()) + process.name():
                    self.killed.append(process.pid)
                    process.kill()
                    return


@pytest.fixture(scope="module")
def watcher(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Watcher:
    overrides = (
        f"model.path={model / 'target'}", f"run.steps={STEPS}", "run.eval_every=0", "run.eval_prompts=128",
        f"run.dir={tmp_path_factory.mktemp('run')}", "drafter.training.when=always",
        *os.environ.get("LONGTAIL_GPU_RUN", "").split(),
    )  # fmt: skip
    config = load_config("reasoner-sglang", overrides=overrides, presets_dir=PRESETS)
    watcher = Watcher()
    watcher.watch = watcher.look
    summary = run_on_ray(config, watcher, on_start=watcher.learn)
    watcher.write("sglang_run", summary)
    return watcher


def test_versions_and_acceptance_grow_without_a_restart(watcher: Watcher) -> None:
    calm = watcher.steps[:CALM_STEPS]
    assert [m.policy_version for m in calm] == list(range(1, CALM_STEPS + 1))
    assert calm[-1].drafter_version >= CALM_STEPS // 2, "a drafter that got better is published"
    assert max(abs(m.surprise_errors) for m in calm) < 6, "responses are the policy's"
    lengths = [m.acceptance_length or 0.0 for m in calm]
    assert sum(lengths[-4:]) / 4 > sum(lengths[:4]) / 4
    lost_at = [e.at_s for e in watcher.events if e.kind in ("slot_lost", "version_mismatch", "server_restarted")]
    assert all(at > calm[-1].at_s for at in lost_at)
    assert max(m.logprob_gap for m in calm) < 0.05


def test_no_memory_leak(watcher: Watcher) -> None:
    assert watcher.memory[CALM_STEPS] == pytest.approx(watcher.memory[SETTLED], rel=0.02), watcher.memory


def test_a_killed_engine_is_replaced_serves_again_and_nothing_is_counted_twice(watcher: Watcher) -> None:
    assert watcher.killed, "no scheduler process of rollout-1 was found to kill"
    told = [(e.kind, e.subject) for e in watcher.events]
    assert ("slot_lost", "rollout-1") in told
    assert watcher.summaries[-1]["status"] == "finished"
    back_s = next((e.at_s for e in watcher.events if (e.kind, e.subject) == ("slot_returned", "rollout-1")), None)
    assert back_s is not None, "no engine took the place of the killed one"
    # A server generates only after it has said that it serves exactly the published versions.
    served = [s for s in watcher.spans if s.slot == "slot 1" and s.role == "rollout" and s.start_s > back_s]
    assert served, f"back after {back_s:.0f} s, and nothing was generated there"
    for groups in watcher.groups.values():
        assert all([r.index for r in g.rollouts] == list(range(len(g.rollouts))) for g in groups)
        ids = [r.rollout_id for g in groups for r in g.rollouts]
        assert len(ids) == len(set(ids))
    assert watcher.steps[-1].policy_version == STEPS
