"""A whole GRPO run whose policy and rollout server take turns on one GPU: the server has most of its memory, the policy
comes in when the server has let go, and neither loses anything by it, step after step."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.cluster import run_on_ray
from deploy.provenance import provenance
from services.config.load import load_config
from services.core.types import StepMetrics
from tests.gpu.cases import PRESETS
from tests.gpu.test_sglang_run import RESULTS, gpu_bytes, gpu_processes
from tests.services.coordinator.world import Recorder

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]

STEPS, SETTLED = 20, 5
SHARE = 0.85  # of the GPU, the server's
# One batch of responses at a time, and waits that end long before this test's own.
COLOCATED = (
    "rollout.num_servers=1", "rollout.engine.release_memory=true", f"rollout.engine.mem_fraction={SHARE}",
    "rollout.engine.kv_tokens=null", "rollout.prompts_per_step=16", "placement.policy=colocated",
    "placement.gpus_per_slot=0.6", "placement.policy_gpus=0.4", "drafter.training.when=always",
    "coordinator.start_timeout_s=200", "coordinator.call_timeout_s=90",
)  # fmt: skip


def total_bytes() -> int:
    """Of the smallest GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return min(int(line) for line in out.split()) * 2**20


@dataclass
class Watcher(Recorder):
    """Notes the first GPU's memory after every step, and has the run's metrics."""

    memory: dict[int, int] = field(default_factory=dict)
    holders: dict[int, list[str]] = field(default_factory=dict)
    servers: int = 1

    @property
    def switches(self) -> dict[str, float]:
        """Of memory, by the metrics' names: how many, seconds and bytes."""
        return {name: value[0] for name, value in self.states[-1].items() if "memory_switch" in name}

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        self.memory[metrics.step] = gpu_bytes()
        if metrics.step in (SETTLED, STEPS):
            self.holders[metrics.step] = gpu_processes()
        print(
            f"step {metrics.step} reward {metrics.reward_mean:.3f} rollout {metrics.rollout_s:.1f} s policy "
            f"{metrics.policy_s:.1f} s publish {metrics.publish_s:.1f} s drafting {metrics.drafting_s:.1f} s gap "
            f"{metrics.logprob_gap:.4f} {self.memory[metrics.step] >> 20} MiB",
            flush=True,
        )


@pytest.fixture(scope="module")
def watcher(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Watcher:
    overrides = (
        f"model.path={model / 'target'}", f"run.steps={STEPS}", "run.eval_every=0", "run.eval_prompts=64",
        f"run.dir={tmp_path_factory.mktemp('run')}", *COLOCATED, *os.environ.get("LONGTAIL_GPU_RUN", "").split(),
    )  # fmt: skip
    config = load_config("reasoner-sglang", overrides=overrides, presets_dir=PRESETS)
    watcher = Watcher(servers=config.rollout.num_servers)
    summary = run_on_ray(config, watcher)
    steps = [
        {"step": m.step, "reward": m.reward_mean, "acceptance_length": m.acceptance_length, "rollout_s": m.rollout_s,
         "policy_s": m.policy_s, "publish_s": m.publish_s, "drafting_s": m.drafting_s, "logprob_gap": m.logprob_gap,
         "policy_version": m.policy_version, "drafter_version": m.drafter_version, "gpu_bytes": watcher.memory[m.step]}
        for m in watcher.steps
    ]  # fmt: skip
    events = [f"{e.at_s:.1f} {e.kind} {e.subject}: {e.message[:160]}" for e in watcher.events]
    record = {
        "provenance": provenance(), "overrides": overrides, "summary": summary, "steps": steps, "events": events,
        "switches": watcher.switches, "holders": watcher.holders,
    }  # fmt: skip
    out = Path(os.environ.get("OUT") or RESULTS) / "colocated_run.json"
    out.write_text(json.dumps(record, indent=1, default=str) + "\n")
    return watcher


def test_every_step_trains_and_loses_nothing(watcher: Watcher) -> None:
    assert watcher.summaries[-1]["status"] == "finished"
    assert [m.policy_version for m in watcher.steps] == list(range(1, STEPS + 1))
    assert not [e for e in watcher.events if e.kind in ("slot_lost", "version_mismatch", "server_restarted")]
    assert max(m.logprob_gap for m in watcher.steps) < 0.05, "the server's weights are those that were published"


def test_every_slot_is_the_policys_in_every_step(watcher: Watcher) -> None:
    for slot in (f"slot {i}" for i in range(watcher.servers)):
        turns = [s for s in watcher.spans if (s.slot, s.role) == (slot, "policy")]
        assert len(turns) == STEPS
        trained = [s for s in watcher.spans if (s.slot, s.role) == (slot, "drafting")]
        assert all(t.end_s <= p.start_s or t.start_s >= p.end_s for t in trained for p in turns)


def test_servers_give_most_of_the_gpu_back_in_every_step(watcher: Watcher) -> None:
    counts = {who: watcher.switches[f"longtail_memory_switches_total|{who}|release"] for who in ("rollout", "policy")}
    assert counts == {"rollout": STEPS * watcher.servers, "policy": STEPS}
    each = watcher.switches["longtail_memory_switch_bytes_total|rollout|release"] / counts["rollout"]
    assert each > 0.8 * SHARE * total_bytes(), f"{each / 2**30:.1f} GiB"


def test_no_memory_leak(watcher: Watcher) -> None:
    assert watcher.memory[STEPS] == pytest.approx(watcher.memory[SETTLED], rel=0.02), watcher.memory
