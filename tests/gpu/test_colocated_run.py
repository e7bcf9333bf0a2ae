"""A whole GRPO run whose policy and rollout server take turns on one GPU: the server has most of its memory, the policy
comes in when the server has let go, and neither loses anything by it, step after step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest

from deploy.cluster import run_on_ray
from services.config.load import load_config
from tests.gpu.cases import PRESETS
from tests.gpu.watching import CALM_STEPS, SETTLED, MemoryWatcher, gpu_bytes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]

STEPS = CALM_STEPS
SHARE = 0.85  # of the GPU, the server's
# One batch of responses at a time, and waits that end long before this test's own.
COLOCATED = (
    "rollout.num_servers=1", "rollout.engine.release_memory=true", f"rollout.engine.mem_fraction={SHARE}",
    "rollout.engine.kv_tokens=null", "rollout.prompts_per_step=16", "placement.policy=colocated",
    "placement.gpus_per_slot=0.6", "placement.policy_gpus=0.4", "drafter.training.when=always",
    "coordinator.start_timeout_s=200", "coordinator.call_timeout_s=90",
)  # fmt: skip


@dataclass
class Watcher(MemoryWatcher):
    """Has the run's metrics."""

    servers: int = 1

    @property
    def switches(self) -> dict[str, float]:
        """Of memory, by the metrics' names: how many, seconds and bytes."""
        return {name: value[0] for name, value in self.states[-1].items() if "memory_switch" in name}


@pytest.fixture(scope="module")
def watcher(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Watcher:
    overrides = (
        f"model.path={model / 'target'}", f"run.steps={STEPS}", "run.eval_every=0", "run.eval_prompts=64",
        f"run.dir={tmp_path_factory.mktemp('run')}", *COLOCATED, *os.environ.get("LONGTAIL_GPU_RUN", "").split(),
    )  # fmt: skip
    config = load_config("reasoner-sglang", overrides=overrides, presets_dir=PRESETS)
    watcher = Watcher(servers=config.rollout.num_servers)
    summary = run_on_ray(config, watcher)
    watcher.write("colocated_run", summary, overrides=overrides, switches=watcher.switches)
    return watcher


def test_every_step_trains_and_loses_nothing(watcher: Watcher) -> None:
    assert watcher.summaries[-1]["status"] == "finished"
    signals = [m.zero_variance_fraction < 1 for m in watcher.steps]  # a step without one leaves the version
    assert len(signals) == STEPS and sum(signals) > STEPS / 2
    assert [m.policy_version for m in watcher.steps] == list(accumulate(signals))
    assert not [e for e in watcher.events if e.kind in ("slot_lost", "version_mismatch", "server_restarted")]
    assert max(m.logprob_gap for m in watcher.steps) < 0.05, "the server's weights are those that were published"
    assert max(abs(m.surprise_errors) for m in watcher.steps) < 6, "responses are the policy's"


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
    assert each > 0.8 * SHARE * min(gpu_bytes("memory.total")), f"{each / 2**30:.1f} GiB"


def test_no_memory_leak(watcher: Watcher) -> None:
    assert watcher.memory[STEPS] == pytest.approx(watcher.memory[SETTLED], rel=0.02), watcher.memory
