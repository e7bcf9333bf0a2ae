"""Our own drawing of panels: what is drawn is what was answered."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from deploy.monitoring.grafana import FOLDER
from deploy.monitoring.picture import amount, draw_dashboard, run_boards, runs, stack
from deploy.monitoring.queries import Line, PrometheusApi

START = 1000.0


class Answering(PrometheusApi):
    """Answers every query with two series of every label that legends name."""

    def __init__(self, empty: bool = False) -> None:
        super().__init__("http://nowhere")
        self.asked: list[str] = []
        self._empty = empty

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[Line]:
        self.asked.append(expr)
        if self._empty:
            return []
        points = tuple((start_s + i, float(i % 4)) for i in range(10))
        return [Line({"slot": f"slot {n}", "role": ("rollout", "idle")[n]}, points) for n in range(2)]


def test_all_dashboards_but_that_of_served_models_show_a_run() -> None:
    assert {f.stem for f in FOLDER.glob("*.json")} - run_boards().keys() == {"longtail-serving"}


@pytest.mark.parametrize("name", run_boards())
@pytest.mark.parametrize("empty", [False, True])
def test_every_panel_of_a_dashboard_is_drawn(name: str, empty: bool) -> None:
    board, api = run_boards()[name], Answering(empty)
    svg = draw_dashboard(board, api, "r1", (START, START + 20))
    texts = [e.text or "" for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    panels = [p for p in board["panels"] if p["type"] != "row"]
    assert {p["title"] for p in panels} <= set(texts)
    assert texts.count("no data in this run") == (len(panels) if empty else 0)
    assert "not a picture of Grafana" in texts[1]
    assert len(api.asked) == sum(len(p["targets"]) for p in panels)
    assert not any("$" in expr for expr in api.asked), "a variable was left in"


def test_neighbours_of_one_role_are_one_bar() -> None:
    line = Line({}, ((0.0, 1.0), (1.0, 1.0), (2.0, 3.0), (3.0, 1.0)))
    assert runs(line, 5.0) == [(0.0, "rollout", 2.0), (2.0, "drafting", 1.0), (3.0, "rollout", 2.0)]


def test_stacks_add_up() -> None:
    a, b = Line({}, ((0.0, 1.0), (1.0, math.nan))), Line({}, ((0.0, 2.0), (1.0, 5.0)))
    (_, top, base), (_, top2, base2) = stack([("a", a), ("b", b)])
    assert (top, base) == ([(0.0, 1.0), (1.0, 0.0)], [(0.0, 0.0), (1.0, 0.0)])
    assert base2 == top and top2 == [(0.0, 3.0), (1.0, 5.0)]


def test_amounts_have_their_unit() -> None:
    assert amount(0.934, "percentunit") == "93 %"
    assert amount(3.58e6, "Bps") == "3.6 MB/s"
    assert re.fullmatch(r"12\D?345", amount(12345, "none")) or amount(12345, "none").startswith("12.3")
    assert amount(0.25, "s") == "0.25 s"
