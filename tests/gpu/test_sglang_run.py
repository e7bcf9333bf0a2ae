"""A whole GRPO run on one GPU: two SGLang servers, their drafter trainers and the policy trainer share it.

Steps 1-20 undisturbed: a drafter and a policy load every step, no restart, no leak. Then one engine is killed, and the
run goes on for longer than an engine takes to start.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from deploy.cluster import run_on_ray
from deploy.provenance import provenance
from services.config.load import load_config
from services.core.types import ProgressView, StepMetrics
from tests.gpu.cases import PRESETS
from tests.services.coordinator.world import Recorder

pytestmark = [pytest.mark.ray, pytest.mark.timeout(580)]

CALM_STEPS, STEPS, KILL_AT = 20, 40, 22
RESULTS = Path(__file__).parent / "results"


def gpu_bytes() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return int(out.split()[0]) * 2**20


def gpu_processes() -> list[str]:
    """Who holds how much; empty where the driver does not tell."""
    command = ["nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()


@dataclass
class Watcher(Recorder):
    """Notes the GPU's memory after every step and kills an engine's scheduler process once."""

    processes: dict[str, int] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    holders: dict[int, list[str]] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        self.memory[metrics.step] = gpu_bytes()
        if metrics.step in (5, CALM_STEPS):
            self.holders[metrics.step] = gpu_processes()
        print(
            f"step {metrics.step} reward {metrics.reward_mean:.3f} acceptance {metrics.acceptance_length} "
            f"rollout {metrics.rollout_s:.1f} s policy {metrics.policy_s:.1f} s publish {metrics.publish_s:.1f} s "
            f"drafting {metrics.drafting_s:.1f} s gap {metrics.logprob_gap:.4f} {self.memory[metrics.step] >> 20} MiB",
            flush=True,
        )

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
    steps = [
        {"step": m.step, "reward": m.reward_mean, "acceptance_length": m.acceptance_length, "rollout_s": m.rollout_s,
         "policy_s": m.policy_s, "publish_s": m.publish_s, "drafting_s": m.drafting_s, "logprob_gap": m.logprob_gap,
         "live": m.acceptance_length_live_offline, "frozen": m.acceptance_length_frozen_offline,
         "policy_version": m.policy_version, "drafter_version": m.drafter_version, "gpu_bytes": watcher.memory[m.step]}
        for m in watcher.steps
    ]  # fmt: skip
    events = [f"{e.at_s:.1f} {e.kind} {e.subject}: {e.message[:160]}" for e in watcher.events]
    record = {
        "provenance": provenance(), "summary": summary, "steps": steps, "events": events, "holders": watcher.holders
    }  # fmt: skip
    out = Path(os.environ.get("OUT") or RESULTS) / "sglang_run.json"
    out.write_text(json.dumps(record, indent=1, default=str) + "\n")
    return watcher


def test_versions_and_acceptance_grow_without_a_restart(watcher: Watcher) -> None:
    calm = watcher.steps[:CALM_STEPS]
    assert [m.policy_version for m in calm] == list(range(1, CALM_STEPS + 1))
    assert calm[-1].drafter_version >= CALM_STEPS // 2, "a drafter that got better is published"
    lengths = [m.acceptance_length or 0.0 for m in calm]
    assert sum(lengths[-4:]) / 4 > sum(lengths[:4]) / 4
    lost_at = [e.at_s for e in watcher.events if e.kind in ("slot_lost", "version_mismatch", "server_restarted")]
    assert all(at > calm[-1].at_s for at in lost_at)
    assert max(m.logprob_gap for m in calm) < 0.05


def test_no_memory_leak(watcher: Watcher) -> None:
    assert watcher.memory[CALM_STEPS] == pytest.approx(watcher.memory[5], rel=0.02), watcher.memory


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
