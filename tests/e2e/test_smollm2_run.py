"""The preset of a real model, as a user starts it: two steps through the whole loop on Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.models.smollm2 import FOLDER, needs_smollm2

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1500


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@needs_smollm2
def test_two_grpo_steps_of_smollm2(tmp_path: Path) -> None:
    smaller = ["rollout.prompts_per_step=1", "rollout.sampling.max_tokens=12", "speculation.selector.calibrate_s=0.1"]
    settings = [f"model.path={FOLDER}", "run.id=smol", *smaller]
    # rewards by chance: whether so few responses hold a right one is luck, and nothing would be learnt without
    (tmp_path / "chance.py").write_text("def score(prompt, rollout):\n    return float(rollout.index % 2)\n")
    settings.append("reward={verifier: function, function: chance.score, timeout_s: 60}")
    command = [sys.executable, "-m", "deploy", "train", "smollm2-cpu", *settings, "--run-dir", str(tmp_path), "--quiet"]
    done = subprocess.run(
        command, cwd=ROOT, env=_with_path(tmp_path), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "smol" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [s["policy_version"] for s in steps] == [1, 2]
    for step in steps:
        assert step["logprob_gap"] < 1e-3 and step["grad_norm"] > 0 and not step["warnings"]
        assert step["num_rollouts"] == 8 and step["zero_variance_fraction"] == 0


def _with_path(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}
