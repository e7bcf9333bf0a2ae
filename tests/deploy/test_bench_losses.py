from __future__ import annotations

import pytest

from deploy import bench_losses
from deploy.provenance import ROOT
from services.config.drafter import DrafterConfig
from services.config.load import load_config


def test_every_loss_trains_from_both_starts_and_is_judged_on_unseen_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROMPTS": 2, "SIBLINGS": 1, "MAX_TOKENS": 12, "TURN_S": 0.05}.items():
        monkeypatch.setattr(bench_losses, name, value)
    overrides = ["data.source.size=64", "rollout.prompts_per_step=3", "rollout.group_size=2"]
    config = load_config("pocket-demo", overrides=overrides, presets_dir=ROOT / "deploy" / "presets")
    found = bench_losses.run_bench(config, 0.1)
    assert found["training_tokens"] > 0 < found["heldout_tokens"] != found["training_tokens"]
    cells = {(c["start"], c["loss"], c["features"], c["mixed"]): c for c in found["cells"]}
    assert len(cells) == 2 * (1 + len(bench_losses.WAYS)) == len(found["cells"])
    for start in bench_losses.STARTS:
        before = cells[start, None, False, False]
        for way in bench_losses.WAYS:
            cell = cells[start, way.loss, way.features, way.mixed]
            assert cell["micro_steps"] > 0 < cell["tokens_per_s"] and cell["per_depth"] != before["per_depth"]
            assert 1 <= cell["engine"] <= 3
    untrained, served = (cells[start, None, False, False] for start in bench_losses.STARTS)
    assert untrained["acceptance_length"] < served["acceptance_length"]


def test_the_ways_differ_in_what_is_minimised_only() -> None:
    own = DrafterConfig(unroll=2, feature_weight=0.3, acceptance_ce_weight=0.05)
    sections = [way.section(own) for way in bench_losses.WAYS]
    found = {(s.loss, s.feature_weight, s.acceptance_ce_weight) for s in sections}
    assert len(found) == len(sections) and found >= {("cross_entropy", 0.3, 0.0), ("total_variation", 0.0, 0.05)}
    changed = {"loss", "feature_weight", "acceptance_ce_weight"}
    assert all(s.model_dump(exclude=changed) == own.model_dump(exclude=changed) for s in sections)
