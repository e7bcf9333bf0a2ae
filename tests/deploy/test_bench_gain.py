"""The bench on the shipped model, with a workload of moments."""

from __future__ import annotations

import pytest

from deploy.bench_gain import Bench, run_bench, with_adaptive
from deploy.provenance import ROOT
from services.config.load import load_config
from services.config.speculation import AdaptiveSelector
from services.core.errors import ConfigError


def test_each_pass_is_counted_whole_and_compared() -> None:
    config = load_config(
        "pocket-tiny", overrides=["rollout.sampling.max_tokens=12"], presets_dir=ROOT / "deploy" / "presets"
    )
    bench = Bench(config, prompts=2)
    off = bench.generate("off", 1)
    assert len(off.rollouts) == 4 and off.tokens == sum(s.tokens for s in off.spans)
    assert {(s.strategy, s.reason) for s in off.spans} == {("off", "forced")} and 0 < off.seconds < off.whole_s
    found = run_bench(config, repeats=1, prompts=2, say=lambda text: None)
    assert found["rollouts"] == 4 and found["response_tokens_max"] <= 12
    assert all(found[name] > 0 for name in ("predicted", "achieved", "measured", "whole"))


def test_a_preset_of_another_selector_gets_chains_and_sglang_is_refused() -> None:
    presets = ROOT / "deploy" / "presets"
    assert isinstance(
        with_adaptive(load_config("pocket-tiny", presets_dir=presets)).speculation.selector, AdaptiveSelector
    )
    with pytest.raises(ConfigError, match="measures the native engine"):
        with_adaptive(load_config("reasoner-sglang", presets_dir=presets))
