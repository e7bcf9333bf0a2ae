from __future__ import annotations

import pytest

from deploy import bench_checkpoint
from deploy.provenance import ROOT
from services.config.load import load_config


def test_the_selective_copy_leaves_the_targets_tensors_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HIDDEN": 32, "INTERMEDIATE": 48, "HEADS": 4, "VOCAB": 100, "SEQUENCE": 12}.items():
        monkeypatch.setattr(bench_checkpoint, name, value)
    found = bench_checkpoint.run_bench(load_config("pocket-demo", presets_dir=ROOT / "deploy" / "presets"), 1)
    assert found["bytes"]["full"] - found["bytes"]["selective"] == 2 * 100 * 32 * 4
    assert found["stall_ratio"] > 0 and found["ms"]["full_sync"] > 0
