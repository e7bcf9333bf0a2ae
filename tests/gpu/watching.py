"""What the GPU tests of whole runs note after each step, and the record that they leave."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.provenance import provenance
from services.core.types import StepMetrics
from tests.services.coordinator.world import Recorder

RESULTS = Path(__file__).parent / "results"
# Steps between which memory may not grow; who holds the GPU is noted at both.
SETTLED, CALM_STEPS = 5, 20


def gpu_bytes(what: str) -> list[int]:
    """memory.used or memory.total of each GPU."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return [int(line) * 2**20 for line in out.split()]


def gpu_processes() -> list[str]:
    """Who holds how much; empty where the driver does not tell."""
    command = ["nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()


@dataclass
class MemoryWatcher(Recorder):
    """Notes the first GPU's memory after every step."""

    memory: dict[int, int] = field(default_factory=dict)
    holders: dict[int, list[str]] = field(default_factory=dict)

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        self.memory[metrics.step] = gpu_bytes("memory.used")[0]
        if metrics.step in (SETTLED, CALM_STEPS):
            self.holders[metrics.step] = gpu_processes()
        print(
            f"step {metrics.step} reward {metrics.reward_mean:.3f} acceptance {metrics.acceptance_length} "
            f"rollout {metrics.rollout_s:.1f} s policy {metrics.policy_s:.1f} s publish {metrics.publish_s:.1f} s "
            f"drafting {metrics.drafting_s:.1f} s gap {metrics.logprob_gap:.4f} {self.memory[metrics.step] >> 20} MiB",
            flush=True,
        )

    def write(self, name: str, summary: Mapping[str, Any], **more: Any) -> None:
        """The record, as NAME.json in $OUT or among the results."""
        steps = [
            {"step": m.step, "reward": m.reward_mean, "acceptance_length": m.acceptance_length,
             "rollout_s": m.rollout_s, "policy_s": m.policy_s, "publish_s": m.publish_s, "drafting_s": m.drafting_s,
             "logprob_gap": m.logprob_gap, "live": m.acceptance_length_live_offline,
             "frozen": m.acceptance_length_frozen_offline, "policy_version": m.policy_version,
             "drafter_version": m.drafter_version, "gpu_bytes": self.memory[m.step]}
            for m in self.steps
        ]  # fmt: skip
        events = [f"{e.at_s:.1f} {e.kind} {e.subject}: {e.message[:160]}" for e in self.events]
        record = {
            "provenance": provenance(), "summary": summary, "steps": steps, "events": events, "holders": self.holders,
            **more,
        }  # fmt: skip
        out = Path(os.environ.get("OUT") or RESULTS) / f"{name}.json"
        out.write_text(json.dumps(record, indent=1, default=str) + "\n")
