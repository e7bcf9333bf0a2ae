"""Curves of several runs: read from their folders, told apart by the strategies their rollouts used."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from services.core.errors import DataError
from services.report.curves import draw_curves, read_curve


def run_folder(path: Path, strategies: dict[str, int]) -> Path:
    rows = [{"kind": "evaluation", "step": 0, "reward_mean": 0.4}]
    rows += [{"kind": "step", "step": s, "reward_mean": 0.4 + s / 50, "steps_by_strategy": strategies} for s in (1, 2)]
    rows.append({"kind": "evaluation", "step": 2, "reward_mean": 0.45})
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def test_runs_are_told_apart_and_drawn(tmp_path: Path) -> None:
    on = read_curve(run_folder(tmp_path / "a<b", {"off": 5, "eagle_3_1_4": 2}))
    off = read_curve(run_folder(tmp_path / "c", {"off": 5}))
    assert (on.group, off.group) == ("on", "off")
    assert on.heldout == ((0, 0.4), (2, 0.45)) and len(on.training) == 2
    root = ElementTree.fromstring(draw_curves([on, off]))
    paths = [e for e in root.iter() if e.tag.endswith("path")]
    assert [p.get("class") for p in paths] == ["line faint", "line faint", "line", "line"]
    assert any("a<b" in (e.text or "") for e in root.iter() if e.tag.endswith("title"))


def test_a_run_under_way_or_without_evaluation_is_drawn(tmp_path: Path) -> None:
    """A cut last line, a reward that was not finite, no held-out evaluation: each leaves a hole, none an error."""
    path = run_folder(tmp_path / "r", {"off": 1})
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in lines if '"step", ' in line]
    broken = json.dumps({"kind": "step", "step": 3, "reward_mean": None, "steps_by_strategy": {}})
    (path / "metrics.jsonl").write_text("\n".join([*steps, broken, steps[0][:20]]), encoding="utf-8")
    curve = read_curve(path)
    assert curve.heldout == () and [x for x, _ in curve.training] == [1, 2]
    ElementTree.fromstring(draw_curves([curve]))


def test_a_folder_without_metrics_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="longtail train"):
        read_curve(tmp_path)
