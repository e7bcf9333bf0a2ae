"""What an installed Prometheus operator and Grafana need: two PodMonitors, alert rules, dashboards as ConfigMaps.

Dashboards and rules are those of deploy/monitoring; without that folder only the PodMonitors are written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deploy.k8s.pods import NAME_LABEL, Manifest

MONITORING_DIR = Path(__file__).parents[1] / "monitoring"
# kube-prometheus-stack takes what carries this label.
_RELEASE = {"release": "prometheus"}
# Ray refreshes the head's figures every ten seconds or so (pitfall 75).
_RAY_INTERVAL, _RUN_INTERVAL = "15s", "5s"


def pod_monitors() -> list[Manifest]:
    """The default PodMonitor scrapes port 8080 only; the autoscaler and the dashboard, whose figures fill half of Ray's
    panels, have ports of their own on the head (pitfall 73)."""
    head = {"metrics": _RAY_INTERVAL, "as-metrics": _RAY_INTERVAL, "dash-metrics": _RAY_INTERVAL}
    return [
        _pod_monitor("longtail-head", "head", {**head, "longtail": _RUN_INTERVAL}),
        _pod_monitor("longtail-workers", "worker", {"metrics": _RAY_INTERVAL}),
    ]


def _pod_monitor(name: str, node_type: str, ports: dict[str, str]) -> Manifest:
    cluster = {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": "ray_io_cluster"}
    group = {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_group"], "targetLabel": "ray_io_group"}
    endpoints = [{"port": p, "interval": every, "relabelings": [cluster, group]} for p, every in ports.items()]
    selector = {"matchLabels": {**NAME_LABEL, "ray.io/node-type": node_type}}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": name, "labels": {**NAME_LABEL, **_RELEASE}},
        "spec": {"selector": selector, "jobLabel": "app.kubernetes.io/name", "podMetricsEndpoints": endpoints},
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


def rule_files(folder: Path = MONITORING_DIR) -> list[Path]:
    """Without the files of `promtool test rules`, which lie beside them."""
    return sorted(f for f in (folder / "rules").glob("*.yaml") if not f.stem.endswith("test"))


def dashboard_files(folder: Path = MONITORING_DIR) -> list[Path]:
    return sorted((folder / "dashboards").glob("*.json"))
