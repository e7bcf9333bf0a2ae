"""What an installed Prometheus operator and Grafana need: three PodMonitors, alert rules, dashboards as ConfigMaps.

Dashboards and rules are those of deploy/monitoring; without that folder only the PodMonitors are written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deploy.k8s.pods import NAME_LABEL, Manifest
from deploy.k8s.ray_objects import SERVING_NAME, run_labels
from deploy.k8s.text import kustomization, manifest_text
from deploy.placement import HEAD, role_label

MONITORING_DIR = Path(__file__).parents[1] / "monitoring"
# kube-prometheus-stack takes what carries this label.
_RELEASE = {"release": "prometheus"}
# Ray refreshes the head's figures every ten seconds or so (pitfall 75).
_RAY_INTERVAL, _RUN_INTERVAL = "15s", "5s"


def pod_monitors() -> list[Manifest]:
    """The default PodMonitor scrapes port 8080 only; the autoscaler and the dashboard, whose figures fill half of Ray's
    panels, have ports of their own on the head (pitfall 73)."""
    ray = ("ray", _RAY_INTERVAL)
    head = {"metrics": ray, "as-metrics": ray, "dash-metrics": ray, "longtail": ("longtail", _RUN_INTERVAL)}
    return [
        _pod_monitor("longtail-head", "head", head),
        _pod_monitor("longtail-workers", "worker", {"metrics": ray}),
        _serving_monitor(),
    ]


def _serving_monitor() -> Manifest:
    """`longtail serve` on Ray Serve: every node's proxy leads to the one process that knows all servers' figures, so
    only the head's is asked. It wants the token of the API."""
    token = {"type": "Bearer", "credentials": {"name": SERVING_NAME, "key": "token"}}
    endpoint = {
        "port": "serve",
        "path": "/metrics",
        "interval": _RUN_INTERVAL,
        "authorization": token,
        "relabelings": [{"targetLabel": "job", "replacement": SERVING_NAME}],
    }
    labels = {**NAME_LABEL, **run_labels(SERVING_NAME), role_label(HEAD): "true"}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": SERVING_NAME, "labels": {**NAME_LABEL, **_RELEASE}},
        "spec": {"selector": {"matchLabels": labels}, "podMetricsEndpoints": [endpoint]},
    }


def _pod_monitor(name: str, node_type: str, ports: dict[str, tuple[str, str]]) -> Manifest:
    """`ports`: name of the port -> job, as rules and dashboards call it, and interval."""
    endpoints = [
        {
            "port": port,
            "interval": every,
            "relabelings": [
                {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": "ray_io_cluster"},
                {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_group"], "targetLabel": "ray_io_group"},
                {"targetLabel": "job", "replacement": job},
            ],
        }
        for port, (job, every) in ports.items()
    ]
    selector = {"matchLabels": {**NAME_LABEL, "ray.io/node-type": node_type}}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": name, "labels": {**NAME_LABEL, **_RELEASE}},
        "spec": {"selector": selector, "podMetricsEndpoints": endpoints},
    }


def prometheus_rule(name: str, text: str) -> Manifest:
    """`text`: a rules file as Prometheus itself reads it."""
    content: dict[str, Any] = yaml.safe_load(text)
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": f"longtail-{name}", "labels": {**NAME_LABEL, **_RELEASE}},
        "spec": {"groups": content["groups"]},
    }


def monitoring_tree(namespace: str, folder: Path = MONITORING_DIR) -> dict[str, str]:
    """Path -> text of a kustomization. kustomize reads nothing outside its root, so the dashboards are copied there."""
    rules = [prometheus_rule(f.stem, f.read_text(encoding="utf-8")) for f in sorted((folder / "rules").glob("*.yaml"))]
    boards = sorted((folder / "dashboards").glob("*.json"))
    return {
        "monitoring/pod-monitors.yaml": manifest_text(
            "For the Prometheus operator. Edit the label `release` to what your Prometheus selects.", *pod_monitors()
        ),
        **({"monitoring/rules.yaml": manifest_text("From deploy/monitoring/rules.", *rules)} if rules else {}),
        **{f"monitoring/dashboards/{f.name}": f.read_text(encoding="utf-8") for f in boards},
        "monitoring/kustomization.yaml": kustomization(
            "Apply after the Prometheus operator is installed. Grafana's sidecar takes the dashboards by their label.",
            namespace=namespace,
            resources=["pod-monitors.yaml"] + ["rules.yaml"] * bool(rules),
            **({"configMapGenerator": [_dashboard_map(f) for f in boards]} if boards else {}),
        ),
    }


def _dashboard_map(file: Path) -> Manifest:
    """One each: a ConfigMap holds 1 MiB."""
    return {
        "name": f"longtail-dashboard-{file.stem}",
        "files": [f"dashboards/{file.name}"],
        "options": {"disableNameSuffixHash": True, "labels": {"grafana_dashboard": "1"}},
    }
