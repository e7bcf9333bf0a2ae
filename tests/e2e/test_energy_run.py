"""`longtail train` on real Ray actors over a made-up NVIDIA driver: Ray finds its GPUs, the meter their joules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ROOT / "tests/services/energy/fake_nvml.c"  # GPU 0 counts energy, GPU 1 tells its power

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the made-up driver with"),
]


def test_a_run_leaves_its_joules_by_role(tmp_path: Path) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(DRIVER)], check=True, timeout=60)
    changes = [f"run.dir={tmp_path / 'runs'}", "model.device=cpu", "placement.gpus_per_slot=1"]
    done = subprocess.run(
        [sys.executable, "-m", "deploy", "train", "pocket-tiny", *changes],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "LD_LIBRARY_PATH": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [row["energy_j"] for row in rows if row["kind"] == "step"]
    assert len(measured) == 2, (run / "events.jsonl").read_text()
    for joules in measured:
        assert joules["rollout"] + joules["draining"] > 0 and joules["idle"] > 0
        assert joules["policy"] == 0, "its trainer has no GPU here"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["energy_method"] == "counter and power" and summary["energy_steps"] == 2
    assert summary["joules_per_step"] * 2 == pytest.approx(sum(sum(j.values()) for j in measured))
    assert "joules of the GPUs per step" in done.stdout
    assert "Joules by role" in (run / "report.html").read_text()
