"""The drawing of a simulation: every line can be told from the others."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from services.core.errors import DataError
from services.report.scaling import draw_scaling

SVG = "{http://www.w3.org/2000/svg}"


def row(gpus: int, shape: str, free: float, reclaimed: float) -> dict[str, Any]:
    return {
        "gpus": gpus, "shape": shape, "sigma": 1.0, "failures": 0.0, "mode": "full", "speedup_over_off": 1.5,
        "freed_share": free, "reclaimed_share": reclaimed, "messages_per_s": 10.0 * gpus,
    }  # fmt: skip


def test_the_part_that_trains_is_drawn_inside_the_time_without_work() -> None:
    """Where all of it trains both lines run alike: one is wide, one thin, in one colour and under one name."""
    rows = [row(n, shape, 0.2, 1.0) for n in (8, 64) for shape in ("7b", "70b")]
    panel = ET.fromstring(draw_scaling(rows)).findall(f"{SVG}g")[1]
    bands = {p.get("stroke"): p.get("d") for p in panel.iter(f"{SVG}path") if p.get("class") == "band"}
    lines = {p.get("stroke"): p.get("d") for p in panel.iter(f"{SVG}path") if p.get("class") == "line"}
    assert len(bands) == 2 and bands == lines
    names = [t.text for t in panel.iter(f"{SVG}text")]
    assert names.count("7b") == names.count("70b") == 1
    assert [p.get("class") for p in panel.iter(f"{SVG}path")] == ["band", "band", "line", "line"], "bands lie below"


def test_lines_that_differ_are_drawn_apart() -> None:
    panel = ET.fromstring(draw_scaling([row(8, "7b", 0.2, 0.5), row(64, "7b", 0.4, 0.5)])).findall(f"{SVG}g")[1]
    band, line = (p.get("d") for p in panel.iter(f"{SVG}path"))
    assert band != line


def test_nothing_simulated_is_nothing_drawn() -> None:
    with pytest.raises(DataError, match="nothing was simulated"):
        draw_scaling([])
