"""Kustomize components: changes that fit every overlay that has their kind of object."""

from __future__ import annotations

from deploy.k8s.pods import Manifest
from deploy.k8s.support import redis
from deploy.k8s.text import component, dump, manifest_text

_QUEUE = "longtail"


def components() -> dict[str, str]:
    queue = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": _QUEUE}}}
    gang = {"metadata": {"labels": {"volcano.sh/queue-name": _QUEUE}}}
    password = {"valueFrom": {"secretKeyRef": {"name": "longtail-redis", "key": "password"}}}
    survives = {"redisAddress": "longtail-redis:6379", "redisPassword": password}
    http = [
        {"op": "replace", "path": "/spec/submissionMode", "value": "HTTPMode"},
        {"op": "remove", "path": "/spec/submitterPodTemplate"},
        {"op": "remove", "path": "/spec/submitterConfig"},
    ]
    fields = {"RayJob": "rayClusterSpec", "RayCluster": "", "RayService": "rayClusterConfig"}
    ft = [
        {
            "target": {"kind": kind},
            "patch": dump(
                [{"op": "add", "path": _join("/spec", field, "gcsFaultToleranceOptions"), "value": survives}]
            ),
        }
        for kind, field in fields.items()
    ]
    return {
        "components/http-mode/kustomization.yaml": component(
            "HTTPMode", [{"target": {"kind": "RayJob"}, "patch": dump(http)}]
        ),
        "components/kueue/kustomization.yaml": component(
            f"Needs Kueue with its ray.io/rayjob integration, and a LocalQueue named {_QUEUE} in the namespace.",
            [_labels("RayJob", queue)],
        ),
        "components/volcano/kustomization.yaml": component(
            f"Needs the operator's option --batch-scheduler=volcano, and a Volcano Queue named {_QUEUE}.",
            [_labels("RayJob", gang)],
        ),
        "components/gcs-fault-tolerance/redis.yaml": manifest_text(
            "Password: kubectl create secret generic longtail-redis --from-literal=password=$(openssl rand -hex 24)",
            *redis(),
        ),
        "components/gcs-fault-tolerance/kustomization.yaml": component(
            "The cluster's GCS keeps its tables in Redis, so workers and detached actors outlive the head pod. The "
            "driver of a job lives on the head and dies with it; a RayJob starts again instead.",
            ft,
            ["redis.yaml"],
        ),
    }


def _labels(kind: str, patch: Manifest) -> Manifest:
    named = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": "any", **patch["metadata"]}}
    return {"target": {"kind": kind}, "patch": dump(named)}


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)
