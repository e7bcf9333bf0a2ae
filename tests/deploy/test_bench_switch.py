"""The bench on the shipped model and drafter, with contexts that are barely long."""

from __future__ import annotations

import pytest

from deploy.bench_switch import Switch, run_bench
from deploy.provenance import ROOT
from services.config.load import load_config
from services.core.errors import ConfigError


def test_a_switch_happens_and_is_told_in_rounds() -> None:
    config = load_config("pocket-demo", overrides=["data.source.size=64"], presets_dir=ROOT / "deploy" / "presets")
    found = run_bench(config, repeats=1, running=2, context=1000)
    assert found["rounds_until_all_draft"] > 2 * 1000 / 128 - 1, "in portions, not at once"
    assert found["drafter_at_once_steps"] < found["target_again_steps"]
    assert found["seconds"][0]["off_round"] > 0 and len(found["stall_on_steps_all"]) == 1


def test_requests_too_short_to_ever_draft_are_refused() -> None:
    config = load_config("pocket-demo", overrides=["data.source.size=64"], presets_dir=ROOT / "deploy" / "presets")
    with pytest.raises(ConfigError, match="raise --context"):
        run_bench(config, repeats=3, running=1, context=256)


def test_stalls_are_measured_in_usual_off_rounds() -> None:
    switch = Switch(off_round=2.0, on_round=3.0, longest_on=5.0, rounds=7, extra=9.0, longest_off=2.5)
    assert switch.stall_on == pytest.approx(1.5) and switch.stall_off == pytest.approx(0.25)
