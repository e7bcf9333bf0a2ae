"""Pod templates of Ray nodes: hardened as the Pod Security Standard "restricted" asks, with a read-only root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.k8s.options import IMAGE
from deploy.k8s.sizing import GIB, Group
from deploy.placement import HEAD, role_label

USER = 10001  # as in the Dockerfile
DATA = "/data"  # the volume: run folders, models, prompt sets
CACHE, TMP = "/cache", "/tmp"  # of each pod its own, gone with it
CONFIG_DIR = "/etc/longtail"
NAME_LABEL = {"app.kubernetes.io/name": "longtail"}
GPU = "nvidia.com/gpu"

# Ray's own metrics, the autoscaler's, the dashboard's, and those of the run's coordinator.
METRICS, AUTOSCALER_METRICS, DASHBOARD_METRICS, RUN_METRICS = 8080, 44217, 44227, 9464
GCS, DASHBOARD, SERVE = 6379, 8265, 8000

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PodOptions:
    """`config_map`: mounted on the head as the run's configuration. `token`: the pod may call the Kubernetes API.
    `secrets`: environment variables, each with the name of a Secret whose key `token` it is."""

    labels: Mapping[str, str]
    config_map: str | None = None
    serve: bool = False
    token: bool = False
    secrets: tuple[tuple[str, str], ...] = ()


def ray_group(group: Group, options: PodOptions) -> Manifest:
    """What a head group and a worker group have in common: start parameters, Ray's node labels, pod template."""
    head = HEAD in group.roles
    start = {
        "num-cpus": str(group.cpus),
        "num-gpus": str(group.gpus),
        "object-store-memory": str(group.object_store),
    }
    if head:
        start["dashboard-host"] = "0.0.0.0"
    return {
        "rayStartParams": start,
        "labels": {role_label(role): "true" for role in group.roles},
        "template": _template(group, options),
    }


def container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def pod_security(user: int = USER) -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def resources(cpus: str, memory: str, gpus: int = 0) -> Manifest:
    """Requests equal limits: Ray hands out all of a pod, so none of it may be lent to others."""
    amounts: Manifest = {"cpu": cpus, "memory": memory, **({GPU: str(gpus)} if gpus else {})}
    return {"requests": dict(amounts), "limits": amounts}


def _template(group: Group, options: PodOptions) -> Manifest:
    head = HEAD in group.roles
    spec: Manifest = {
        "restartPolicy": "Never",  # as autoscaler v2 demands; KubeRay makes a new pod instead
        "automountServiceAccountToken": head and options.token,
        "securityContext": pod_security(),
        "containers": [_container(group, options)],
        "volumes": _volumes(group, options),
    }
    if group.gpus:
        spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    roles = {role_label(role): "true" for role in group.roles}
    return {"metadata": {"labels": {**NAME_LABEL, **options.labels, **roles}}, "spec": spec}


def _container(group: Group, options: PodOptions) -> Manifest:
    head = HEAD in group.roles
    mounts = [
        {"name": "data", "mountPath": DATA},
        {"name": "tmp", "mountPath": TMP},
        {"name": "cache", "mountPath": CACHE},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if head and options.config_map:
        mounts.append({"name": "config", "mountPath": CONFIG_DIR, "readOnly": True})
    return {
        "name": "ray-head" if head else "ray-worker",
        "image": IMAGE,
        "workingDir": DATA,
        "env": [
            {"name": "HOME", "value": CACHE},  # what libraries compile and download
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
            # Longer than a head takes to come back, for clusters whose GCS survives it.
            {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "300"},
            *({"name": n, "valueFrom": {"secretKeyRef": {"name": s, "key": "token"}}} for n, s in options.secrets),
        ],
        "ports": _ports(head, options.serve),
        "resources": resources(str(group.cpu_limit), _gib(group.memory), group.gpus),
        "securityContext": container_security(),
        "volumeMounts": mounts,
    }


def _ports(head: bool, serve: bool) -> list[Manifest]:
    ports = {"metrics": METRICS}
    if head:
        ports |= {"gcs-server": GCS, "dashboard": DASHBOARD}
        ports |= {"as-metrics": AUTOSCALER_METRICS, "dash-metrics": DASHBOARD_METRICS, "longtail": RUN_METRICS}
    if serve:
        ports["serve"] = SERVE
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _volumes(group: Group, options: PodOptions) -> list[Manifest]:
    shm = {"medium": "Memory", "sizeLimit": _gib(group.object_store + GIB)}  # NCCL's buffers lie there too
    volumes: list[Manifest] = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "longtail-data"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": shm},
    ]
    if HEAD in group.roles and options.config_map:
        volumes.append({"name": "config", "configMap": {"name": options.config_map}})
    return volumes


def _gib(amount: int) -> str:
    return f"{-(-amount // GIB)}Gi"
