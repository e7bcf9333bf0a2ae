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


def test_a_folder_without_metrics_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="longtail train"):
        read_curve(tmp_path)
