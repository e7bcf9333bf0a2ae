"""The committed dashboards: what the code makes, whole, and about metrics that exist."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.monitoring.grafana import DASHBOARDS, FOLDER, render
from deploy.monitoring.prometheus_server import RULE_FILES, RULES
from deploy.monitoring.queries import flat_panels, metric_names, panel_queries
from services.coordinator.telemetry.labels import STATES
from services.coordinator.telemetry.table import METRICS, SERVING, sample_names

# Metrics that no panel shows, and why.
NOT_SHOWN: dict[str, str] = {}
SAMPLES = {name: metric for metric in (*METRICS, *SERVING) for name in sample_names(metric)}
FILES = sorted(FOLDER.glob("*.json"))


def boards() -> list[Any]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in FILES]


@pytest.mark.parametrize("spec", DASHBOARDS, ids=lambda s: s.uid)
def test_the_committed_json_is_what_the_code_makes(spec: Any) -> None:
    committed = (FOLDER / f"{spec.uid}.json").read_text(encoding="utf-8")
    assert committed == render(spec), "run python -m deploy.monitoring.grafana"


def test_no_dashboard_is_left_over() -> None:
    assert [f.stem for f in FILES] == sorted(spec.uid for spec in DASHBOARDS)


def test_every_metric_of_a_panel_exists() -> None:
    unknown = {(q.panel, name) for q in panel_queries(FOLDER) for name in metric_names(q.expr) if name not in SAMPLES}
    assert not unknown


def test_every_metric_is_shown_or_listed_as_not_shown() -> None:
    used = {SAMPLES[name].name for q in panel_queries(FOLDER) for name in metric_names(q.expr)}
    assert {m.name for m in (*METRICS, *SERVING)} - used == set(NOT_SHOWN)


def test_counters_are_rated_and_gauges_are_not() -> None:
    """Row 76: a counter's own value says nothing, and it may begin again at zero."""
    for query in panel_queries(FOLDER):
        for name in metric_names(query.expr):
            rated = re.search(rf"(rate|increase)\({name}\{{", query.expr) is not None
            if name == "longtail_coordinator_restarts_total":
                continue  # an event in a life, shown as a count
            assert rated == (SAMPLES[name].kind != "gauge"), f"{query.panel}: {name}"


def test_labels_in_queries_are_those_of_the_metric() -> None:
    for query in panel_queries(FOLDER):
        for name, matchers in re.findall(r"\b(longtail_[a-z0-9_]+)\{([^}]*)\}", query.expr):
            allowed = {"run_id", "le", *SAMPLES[name].labels}
            assert set(re.findall(r"(\w+)(?:=|!)", matchers)) <= allowed, f"{query.panel}: {name}"


def test_legends_name_labels_that_the_query_keeps() -> None:
    for query in panel_queries(FOLDER):
        known = {label for name in metric_names(query.expr) for label in SAMPLES[name].labels} | {"run_id"}
        kept = re.search(r"sum by \(([^)]*)\)", query.expr)
        if kept:
            known &= set(kept[1].split(", "))
        assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= known, query.panel


@pytest.mark.parametrize("board", boards(), ids=lambda b: b["uid"])
def test_a_dashboard_is_whole(board: Any) -> None:
    panels = list(flat_panels(board))
    everything = [*panels, *(p for p in board["panels"] if p["type"] == "row")]
    assert board["schemaVersion"] >= 39, "Grafana 11 and later"
    assert len({p["id"] for p in everything}) == len(everything)
    own = {"model"} if board["uid"] == "longtail-serving" else {"run", "window"}
    assert {v["name"] for v in board["templating"]["list"]} == {"datasource", *own}
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"] and panel["title"] and "unit" in panel["fieldConfig"]["defaults"]
    boxes = [(p["title"], p["gridPos"]) for p in everything]
    for (one, a), (other, b) in combinations(boxes, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart |= a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart, f"{one} and {other} overlap"
    assert all(g["x"] + g["w"] <= 24 for _, g in boxes)


def test_titles_are_unique_within_a_dashboard() -> None:
    for board in boards():
        titles = [p["title"] for p in flat_panels(board)]
        assert len(set(titles)) == len(titles)


def test_the_timeline_maps_every_role_to_a_colour() -> None:
    (panel,) = (p for b in boards() for p in flat_panels(b) if p["type"] == "state-timeline")
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    found = {code: entry["text"] for code, entry in mapping["options"].items()}
    assert found == {str(code): state.value for code, state in enumerate(STATES)}
    assert len({entry["color"] for entry in mapping["options"].values()}) == len(STATES)


def test_rules_speak_of_metrics_and_panels_that_exist() -> None:
    titles = {p["title"] for b in boards() for p in flat_panels(b)}
    for name in RULE_FILES:
        text = Path(RULES / name).read_text(encoding="utf-8")
        rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
        for rule in rules:
            names = set(re.findall(r"(?<![:\w])longtail_[a-z0-9_]+", rule["expr"]))
            assert names <= set(SAMPLES), rule
        assert {t.strip() for t in re.findall(r"\(panel ([^)]*)\)", text)} <= titles
