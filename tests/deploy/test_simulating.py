from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.__main__ import app
from deploy.modes import in_mode
from deploy.provenance import ROOT
from deploy.simulating import Question, answer, as_tree, sized, speedups, write
from services.config.load import load_config
from services.core.errors import ConfigError

CONFIG = load_config("reasoner-adaptive", presets_dir=ROOT / "deploy" / "presets")
SMALL = Question(gpus=(8,), median=100.0, max_tokens=800, rollouts=16, steps=1)


def test_every_cluster_is_simulated_in_every_mode_and_compared_with_off(tmp_path: Path) -> None:
    question = replace(SMALL, gpus=(8, 16))
    rows = answer(CONFIG, question, lambda line: None)
    assert [(r.point.gpus, r.point.mode) for r in rows] == [(n, m) for n in (8, 16) for m in ("off", "static", "full")]
    gains = speedups(rows, "off")
    assert all(gains[r.point] == 1 for r in rows if r.point.mode == "off")
    assert all(gains[r.point] > 1.05 for r in rows if r.point.mode != "off")
    assert rows[1].point.strategy is not None and rows[1].point.strategy.startswith("eagle")
    write(tmp_path / "out", question, rows)
    tree = json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert tree["rows"][2]["speedup_over_off"] == pytest.approx(gains[rows[2].point], abs=1e-3)
    assert {"measured", "stated", "simulated"} <= tree.keys()
    drawing = ET.fromstring((tmp_path / "out" / "simulation.svg").read_text())
    assert sum(e.tag.endswith("circle") for e in drawing.iter()) >= 8


def test_a_server_of_a_large_shape_takes_several_gpus() -> None:
    (row,) = answer(CONFIG, replace(SMALL, gpus=(16,), shapes=("70b",), modes=("off",)), lambda line: None)
    assert row.slots == 2
    with pytest.raises(ConfigError, match="multiple"):
        answer(CONFIG, replace(SMALL, gpus=(12,), shapes=("70b",)), lambda line: None)
    with pytest.raises(ConfigError, match="7b"):
        answer(CONFIG, replace(SMALL, shapes=("8b",)), lambda line: None)


def test_slots_train_beside_a_policy_that_has_gpus_of_its_own() -> None:
    beside = {mode: sized(in_mode(CONFIG, mode), SMALL, 8).drafts_beside_policy for mode in ("off", "static", "full")}
    assert beside == {"off": False, "static": False, "full": True}
    assert not sized(in_mode(CONFIG, "tlt"), SMALL, 8).drafts_beside_policy, "the reference does not"
    (row,) = answer(CONFIG, replace(SMALL, modes=("full",)), lambda line: None)
    assert 0 < row.freed_share <= 1


def test_a_colocated_policy_has_the_slots_while_it_is_trained() -> None:
    shared = load_config("reasoner-e2e", overrides=["drafter.states=policy"], presets_dir=ROOT / "deploy" / "presets")
    assert not sized(in_mode(shared, "full"), SMALL, 8).drafts_beside_policy
    rows = answer(shared, replace(SMALL, modes=("off", "full")), lambda line: None)
    assert [row.point.mode for row in rows] == ["off", "full"]


def test_failures_cost_time_and_are_counted() -> None:
    calm, failing = (
        answer(CONFIG, replace(SMALL, failures=(rate,), modes=("off",), steps=2), lambda line: None)[0]
        for rate in (0.0, 100.0)
    )
    assert calm.lost_slots == 0 < failing.lost_slots
    assert as_tree(SMALL, [failing])["rows"][0]["failures"] == 100.0


def test_the_command_tells_a_table_and_json() -> None:
    command = ["simulate", "--gpus", "8", "--lognormal", "100", "--max-tokens", "400", "--rollouts", "16"]
    done = CliRunner().invoke(app, [*command, "--steps", "1", "--modes", "off,full", "--json"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0].split()[0] == "gpus"
    assert len(json.loads(done.stdout.splitlines()[-1])["rows"]) == 2
    assert CliRunner().invoke(app, ["simulate", "--gpus", "many"]).exit_code == 2
