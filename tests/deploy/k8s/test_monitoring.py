"""Rules and dashboards as files become what the Prometheus operator and Grafana's sidecar take."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from deploy.k8s.kustomize import build
from deploy.k8s.monitoring import monitoring_tree, pod_monitors
from deploy.k8s.render import write_tree
from deploy.k8s.validate import check_stream

ROOT = Path(__file__).resolve().parents[3]
RULES = """
groups:
  - name: alerts
    rules:
      - alert: Idle
        expr: up{job="longtail"} == 0
        for: 2m
        annotations: {summary: "{{ $labels.instance }} is silent"}
"""


def folder_with(tmp_path: Path, rules: str) -> Path:
    source = tmp_path / "source"
    for name, file, text in (("rules", "alerts.yaml", rules), ("dashboards", "learning.json", '{"uid": "x"}')):
        (source / name).mkdir(parents=True)
        (source / name / file).write_text(text, encoding="utf-8")
    return source


def built(tmp_path: Path, rules: str) -> str:
    write_tree(monitoring_tree("longtail", folder_with(tmp_path, rules)), tmp_path / "out")
    return build(tmp_path / "out" / "monitoring")


def test_rules_and_dashboards_arrive(tmp_path: Path) -> None:
    text = built(tmp_path, RULES)
    assert check_stream(text, "monitoring")[1] == []
    manifests = {m["kind"]: m for m in yaml.safe_load_all(text)}
    assert manifests["PrometheusRule"]["spec"]["groups"] == yaml.safe_load(RULES)["groups"]
    board = manifests["ConfigMap"]
    assert board["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(board["data"]["learning.json"]) == {"uid": "x"}


def test_a_rule_that_the_operator_would_refuse_is_caught(tmp_path: Path) -> None:
    text = built(tmp_path, RULES.replace("for: 2m", "for: soon").replace("expr:", "exprr:"))
    found = " | ".join(f.problem for f in check_stream(text, "monitoring")[1])
    assert "unknown field exprr; did you mean expr?" in found and "'soon' does not match" in found


def test_the_runs_own_figures_have_a_job_of_their_own() -> None:
    """Rules and dashboards tell Ray's endpoints and the run's apart by the label `job`; Ray's head refreshes slowly."""
    jobs = {}
    for monitor in pod_monitors():
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            (job,) = [r["replacement"] for r in endpoint["relabelings"] if r["targetLabel"] == "job"]
            jobs[endpoint["port"]] = (job, endpoint["interval"])
    ray = ("ray", "15s")
    assert jobs == {
        "metrics": ray,
        "as-metrics": ray,
        "dash-metrics": ray,
        "longtail": ("longtail", "5s"),
        "serve": ("longtail-serving", "5s"),
    }


def test_a_served_model_is_scraped_once_and_with_its_token() -> None:
    """Every proxy leads to the same figures: scraped at each node they would count as often."""
    (monitor,) = (m for m in pod_monitors() if m["metadata"]["name"] == "longtail-serving")
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    service = yaml.safe_load((ROOT / "k8s/overlays/serving/rayservice.yaml").read_text(encoding="utf-8"))
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    scraped = [chosen <= g["template"]["metadata"]["labels"].items() for g in groups]
    assert scraped == [True, False]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    container = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {p["name"]: p["containerPort"] for p in container["ports"]}[endpoint["port"]] == 8000
    told = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in container["env"] if "valueFrom" in e}
    assert endpoint["authorization"]["credentials"] == told["LONGTAIL_TOKEN"]
