"""`longtail bench spot` on real actors: set-up, phases and runs, small. What it measures here says nothing."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from deploy.bench_spot import run_bench
from deploy.cli_shared import config_of
from services.core.errors import ConfigError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
SMALL = [
    "rollout.num_servers=2", "rollout.prompts_per_step=6", "rollout.group_size=4", "rollout.sampling.max_tokens=160",
    "rollout.engine.max_len=416", "data.source.size=200", "run.steps=2",
]  # fmt: skip


def test_every_figure_is_there_and_idle_time_was_used(tmp_path: Path) -> None:
    found = run_bench(config_of("pocket-spot", SMALL), repeats=1, seeds=1, picture=tmp_path / "spot.svg")
    assert found["slots"] == 2 and found["rollouts"] == 24 and len(found["ratios"]) == 1
    assert 0 < found["idle_used_share"] <= found["leased_share"] <= 1.05
    assert found["rollout_s_with"] > 0 and found["rollout_s_without"] > 0 and found["preemptions"] > 0
    assert 0 < found["micro_step_ms"] <= found["micro_step_p99_ms"]
    assert 1 <= found["acceptance"]["untrained"] < found["acceptance"]["live"]
    assert ET.fromstring((tmp_path / "spot.svg").read_text()).tag.endswith("svg")


def test_without_a_drafter_to_train_there_is_nothing_to_measure() -> None:
    with pytest.raises(ConfigError, match="choose a strategy with drafter 'eagle'"):
        run_bench(config_of("pocket-spot", ["speculation.selector.strategy={drafter: 'off'}"]), 1, 0, None)
