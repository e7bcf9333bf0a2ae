from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.bench_costs import run_bench
from deploy.bench_selector import STRATEGIES
from deploy.replay import cost_point, read_costs
from services.config.load import load_config
from services.speculation.cost_table import CostTable

PRESET = Path(__file__).resolve().parents[2] / "deploy/presets/pocket-tiny.yaml"


def test_what_it_records_can_be_replayed(tmp_path: Path) -> None:
    said: list[str] = []
    result = json.loads(json.dumps(run_bench(load_config(PRESET), 1.0, said.append)))
    points = [cost_point(p) for p in result["points"]]
    assert {p.strategy.name for p in points} == {s.name for s in STRATEGIES}
    assert all(p.total > 0 for p in points) and {p.view.running for p in points} >= {1}
    assert CostTable.fit(points).spread == pytest.approx(result["spread"], abs=0.02)
    assert len(said[0].splitlines()) == len(points) + 2
    (tmp_path / "mine.json").write_text(json.dumps({"points": result["points"]}), encoding="utf-8")
    assert read_costs("mine", tmp_path).points == tuple(points)
