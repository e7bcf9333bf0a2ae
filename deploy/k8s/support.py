"""What the Ray objects stand on: namespace, volume, network policies, disruption budgets, Redis."""

from __future__ import annotations

from deploy.k8s.pods import (
    AUTOSCALER_METRICS,
    DASHBOARD,
    DASHBOARD_METRICS,
    METRICS,
    NAME_LABEL,
    RUN_METRICS,
    SERVE,
    Manifest,
    container_security,
    pod_security,
    resources,
)
from deploy.k8s.ray_objects import SERVING_NAME, run_labels
from deploy.placement import HEAD, role_label

REDIS_IMAGE = "redis:7.2.5-alpine"  # 7.2 is the last line under the BSD licence
REDIS_USER = 999
_REDIS_NAME = {"app.kubernetes.io/name": "longtail-redis"}
_HEALTH = 52365  # the dashboard agent, which the operator asks about Serve
_NAMESPACE_NAME = "kubernetes.io/metadata.name"


def namespace(name: str) -> Manifest:
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {**NAME_LABEL, **labels}}}


def volume_claim(size: str = "200Gi") -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "longtail-data", "labels": dict(NAME_LABEL)},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}},
    }


def network_policies() -> list[Manifest]:
    """Nothing in or out but what is named. Longtail's pods talk to each other on any port: Ray picks ports freely."""
    own = {"podSelector": {"matchLabels": dict(NAME_LABEL)}}
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    prometheus = {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: "monitoring"}}}
    dns = {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: "kube-system"}}}
    scraped = [_tcp(p) for p in (METRICS, AUTOSCALER_METRICS, DASHBOARD_METRICS, RUN_METRICS)]
    served = {**NAME_LABEL, **run_labels(SERVING_NAME)}  # its figures are behind the API's own port, and its token
    asked = [_tcp(p) for p in (DASHBOARD, SERVE, _HEALTH)]
    lookup = [{"protocol": "UDP", "port": 53}, _tcp(53)]
    return [
        _policy("longtail-deny", NAME_LABEL, {"policyTypes": ["Ingress", "Egress"]}),
        _policy(
            "longtail-among-themselves",
            NAME_LABEL,
            {"policyTypes": ["Ingress", "Egress"], "ingress": [{"from": [own]}], "egress": [{"to": [own]}]},
        ),
        _policy("longtail-from-operator", NAME_LABEL, _ingress([operator], asked)),
        _policy("longtail-from-prometheus", NAME_LABEL, _ingress([prometheus], scraped)),
        _policy(f"{SERVING_NAME}-from-prometheus", served, _ingress([prometheus], [_tcp(SERVE)])),
        _policy("longtail-to-dns", NAME_LABEL, _egress([dns], lookup)),
    ]


def api_server_policy() -> Manifest:
    """The autoscaler beside the head changes the RayCluster, so it must reach the API server, whose address differs
    from cluster to cluster."""
    head = {**NAME_LABEL, role_label(HEAD): "true"}
    anywhere = {"ipBlock": {"cidr": "0.0.0.0/0"}}
    return _policy("longtail-head-to-api-server", head, _egress([anywhere], [_tcp(443), _tcp(6443)]))


def disruption_budgets(run_id: str, labels: dict[str, str], roles: tuple[str, ...]) -> list[Manifest]:
    """For the pods whose eviction throws a run back to its last checkpoint. A number, not a percentage: the pods'
    controller has no scale subresource. Rollout pods have none, the run goes on without one."""
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": f"{run_id}-{role}", "labels": {**NAME_LABEL, **labels}},
            "spec": {
                "minAvailable": 1,
                "selector": {"matchLabels": {**NAME_LABEL, **labels, role_label(role): "true"}},
            },
        }
        for role in roles
    ]


def redis() -> list[Manifest]:
    """One Redis with its own volume, for the GCS of clusters that shall survive their head. Its password is in the
    Secret longtail-redis, key `password`."""
    password = {"name": "REDIS_PASSWORD", "valueFrom": {"secretKeyRef": {"name": "longtail-redis", "key": "password"}}}
    server = {
        "name": "redis",
        "image": REDIS_IMAGE,
        "args": ["redis-server", "--requirepass", "$(REDIS_PASSWORD)", "--appendonly", "yes", "--dir", "/data"],
        "env": [password],
        "ports": [{"name": "redis", "containerPort": 6379}],
        "resources": resources("500m", "1Gi"),
        "securityContext": container_security(),
        "volumeMounts": [{"name": "redis-data", "mountPath": "/data"}],
        "readinessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 5},
    }
    pod = {
        "metadata": {"labels": dict(_REDIS_NAME)},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": pod_security(REDIS_USER),
            "containers": [server],
        },
    }
    claim = {
        "metadata": {"name": "redis-data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}},
    }
    selector = {"matchLabels": dict(_REDIS_NAME)}
    stateful = {
        "serviceName": "longtail-redis",
        "replicas": 1,
        "selector": selector,
        "template": pod,
        "volumeClaimTemplates": [claim],
    }
    service = {"selector": dict(_REDIS_NAME), "ports": [{"name": "redis", "port": 6379, "targetPort": "redis"}]}
    ours = [{"podSelector": {"matchLabels": dict(NAME_LABEL)}}]
    itself = [{"podSelector": {"matchLabels": dict(_REDIS_NAME)}}]
    metadata = {"name": "longtail-redis", "labels": dict(_REDIS_NAME)}
    return [
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": stateful},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        _policy("longtail-redis", _REDIS_NAME, {**_ingress(ours, [_tcp(6379)]), "policyTypes": ["Ingress", "Egress"]}),
        _policy("longtail-to-redis", NAME_LABEL, _egress(itself, [_tcp(6379)])),
    ]


def _policy(name: str, labels: dict[str, str], spec: Manifest) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {"podSelector": {"matchLabels": dict(labels)}, **spec},
    }


def _ingress(sources: list[Manifest], ports: list[Manifest]) -> Manifest:
    return {"policyTypes": ["Ingress"], "ingress": [{"from": sources, "ports": ports}]}


def _egress(targets: list[Manifest], ports: list[Manifest]) -> Manifest:
    return {"policyTypes": ["Egress"], "egress": [{"to": targets, "ports": ports}]}


def _tcp(port: int) -> Manifest:
    return {"protocol": "TCP", "port": port}
