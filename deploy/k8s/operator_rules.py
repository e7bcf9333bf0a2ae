"""What KubeRay 1.7 refuses beyond its schemas: the rules of its validation (validation.go, association of names) and of
the CRDs' x-kubernetes-validations, in our words. Each yields lines that name field and remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Spec = Mapping[str, Any]
_DNS_1035 = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_LABEL_KEY = re.compile(r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?$")
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?$")
# The operator appends to these names, and Services must stay within 63 characters.
_LONGEST = {"RayCluster": 53, "RayJob": 47, "RayService": 47, "RayCronJob": 47}
_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
_MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
_V2_ENV = "RAY_enable_autoscaler_v2"


def operator_problems(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Of one manifest of apiVersion ray.io/v1 that its schema accepts."""
    kind, metadata, spec = manifest["kind"], manifest["metadata"], manifest["spec"]
    yield from _name_problems(kind, metadata["name"])
    if spec.get("managedBy", _MANAGERS[0]) not in _MANAGERS:
        yield f"spec.managedBy {spec['managedBy']!r} must be {' or '.join(_MANAGERS)}"
    job = job_spec(manifest)
    if job is not None:
        yield from _job_problems(job)
    for path, cluster in ray_clusters(manifest):
        for problem in cluster_problems(cluster, metadata.get("annotations", {})):
            yield f"{path}.{problem}"


def ray_clusters(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Spec]]:
    """(path, RayClusterSpec) within a manifest of KubeRay."""
    job = job_spec(manifest)
    if manifest["kind"] == "RayCluster":
        yield "spec", manifest["spec"]
    elif manifest["kind"] == "RayService" and "rayClusterConfig" in manifest["spec"]:
        yield "spec.rayClusterConfig", manifest["spec"]["rayClusterConfig"]
    elif job is not None and "rayClusterSpec" in job:
        yield "spec.rayClusterSpec", job["rayClusterSpec"]


def job_spec(manifest: Mapping[str, Any]) -> Spec | None:
    if manifest["kind"] == "RayJob":
        return manifest["spec"]
    return manifest["spec"].get("jobTemplate") if manifest["kind"] == "RayCronJob" else None


def groups_of(cluster: Spec) -> Iterator[tuple[str, Spec]]:
    """(path, group): the head, then the workers."""
    yield "headGroupSpec", cluster["headGroupSpec"]
    for i, group in enumerate(cluster.get("workerGroupSpecs", ())):
        yield f"workerGroupSpecs[{i}]", group


def ray_container(group: Spec) -> Spec:
    first: Spec = group["template"]["spec"]["containers"][0]
    return first


def cluster_problems(cluster: Spec, annotations: Mapping[str, str]) -> Iterator[str]:
    empty = [path for path, g in groups_of(cluster) if not g["template"].get("spec", {}).get("containers")]
    if empty:
        yield from (f"{path}.template.spec.containers: at least one, the first is Ray's" for path in empty)
        return
    for path, group in groups_of(cluster):
        yield from (f"{path}.{problem}" for problem in _group_problems(group))
    yield from _replica_problems(cluster)
    yield from _redis_problems(cluster, annotations)
    yield from _autoscaler_problems(cluster)
    if cluster.get("authOptions", {}).get("mode") == "token" and _version(cluster) < (2, 52):
        version = cluster.get("rayVersion", "not set")
        yield f"authOptions.mode: token needs rayVersion 2.52 or later, and it is {version}"


def _name_problems(kind: str, name: str) -> Iterator[str]:
    if not _DNS_1035.match(name):
        yield f"metadata.name {name!r}: lower-case letters, digits and dashes, beginning with a letter"
    if len(name) > _LONGEST.get(kind, 63):
        yield f"metadata.name {name!r} has {len(name)} characters, a {kind} may have {_LONGEST[kind]}"


def _group_problems(group: Spec) -> Iterator[str]:
    start = group.get("rayStartParams", {})
    doubled = [key for key in _RESOURCES if start.get(key)]
    if doubled and group.get("resources"):
        yield f"resources and rayStartParams ({', '.join(doubled)}) both say what Ray hands out: use one of them"
    if "labels" in start:
        yield "rayStartParams.labels is refused: set the group's own labels"
    for key, value in group.get("labels", {}).items():
        if not _LABEL_KEY.match(key) or not _LABEL_VALUE.match(value):
            yield f"labels: {key}={value!r} is not a valid label"


def _replica_problems(cluster: Spec) -> Iterator[str]:
    autoscaled = cluster.get("enableInTreeAutoscaling", False)
    for i, group in enumerate(cluster.get("workerGroupSpecs", ())):
        low, high, path = group.get("minReplicas", 0), group.get("maxReplicas"), f"workerGroupSpecs[{i}]"
        if high is not None and low > high:
            yield f"{path}: minReplicas {low} exceeds maxReplicas {high}"
        if not autoscaled and not {"minReplicas", "maxReplicas"} <= group.keys():
            yield f"{path}: without autoscaling both minReplicas and maxReplicas must be set"
        if autoscaled and group.get("suspend"):
            yield f"{path}.suspend does not go with autoscaling"


def _redis_problems(cluster: Spec, annotations: Mapping[str, str]) -> Iterator[str]:
    head = cluster["headGroupSpec"]
    env, start = _env(ray_container(head)), head.get("rayStartParams", {})
    tolerant = "gcsFaultToleranceOptions" in cluster
    if not tolerant and "RAY_REDIS_ADDRESS" in env and annotations.get("ray.io/ft-enabled") != "true":
        yield "headGroupSpec: RAY_REDIS_ADDRESS is set: set gcsFaultToleranceOptions.redisAddress instead"
    if tolerant:
        for name in {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"} & env.keys():
            yield f"headGroupSpec: {name} beside gcsFaultToleranceOptions: say it there only"
        if start.get("redis-password"):
            yield "headGroupSpec.rayStartParams.redis-password: set gcsFaultToleranceOptions.redisPassword instead"
        for name in {"ray.io/ft-enabled", "ray.io/external-storage-namespace"} & annotations.keys():
            yield f"gcsFaultToleranceOptions: the annotation {name} says the same: remove it"
    if start.get("redis-username") or "REDIS_USERNAME" in env:
        yield "headGroupSpec: the Redis user belongs in gcsFaultToleranceOptions.redisUsername"


def _autoscaler_problems(cluster: Spec) -> Iterator[str]:
    env = _env(ray_container(cluster["headGroupSpec"]))
    version = cluster.get("autoscalerOptions", {}).get("version")
    if not cluster.get("enableInTreeAutoscaling"):
        if env.get(_V2_ENV) in ("1", "true"):
            yield f"headGroupSpec: {_V2_ENV} without enableInTreeAutoscaling: true"
        return
    if version and _V2_ENV in env:
        yield f"autoscalerOptions.version and the head's {_V2_ENV} are both set: use the former"
    if version == "v2" or env.get(_V2_ENV) in ("1", "true"):
        for path, group in groups_of(cluster):
            policy = group["template"]["spec"].get("restartPolicy", "Never")
            if policy != "Never":
                yield f"{path}.template.spec.restartPolicy {policy}: autoscaler v2 needs Never, or none set"


def _job_problems(job: Spec) -> Iterator[str]:
    mode, selector = job.get("submissionMode", "K8sJobMode"), job.get("clusterSelector")
    shutdown, retries = job.get("shutdownAfterJobFinishes", False), job.get("backoffLimit", 0)
    if mode not in ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"):
        yield f"spec.submissionMode {mode!r} must be K8sJobMode, HTTPMode, SidecarMode or InteractiveMode"
    if "rayClusterSpec" not in job and not selector:
        yield "spec: one of rayClusterSpec and clusterSelector must be set"
    if job.get("suspend") and (not shutdown or selector):
        yield "spec.suspend needs shutdownAfterJobFinishes: true and no clusterSelector"
    if job.get("ttlSecondsAfterFinished", 0) > 0 and not shutdown:
        yield "spec.ttlSecondsAfterFinished needs shutdownAfterJobFinishes: true"
    if retries < 0 or (retries and (selector or mode == "InteractiveMode")):
        yield f"spec.backoffLimit {retries}: 0 or more, and 0 with clusterSelector or InteractiveMode"
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if job.get(key, 1) <= 0:
            yield f"spec.{key} must be above 0"
    if mode == "SidecarMode":
        for key in {"submitterPodTemplate", "submitterConfig", "clusterSelector"} & job.keys():
            yield f"spec.{key} does not go with SidecarMode"
    if "deletionStrategy" in job:
        yield from _deletion_problems(job["deletionStrategy"], shutdown)


def _deletion_problems(strategy: Spec, shutdown: bool) -> Iterator[str]:
    path, rules = "spec.deletionStrategy", strategy.get("deletionRules")
    old = {"onSuccess", "onFailure"} & strategy.keys()
    if old and rules:
        yield f"{path}: onSuccess and onFailure do not go with deletionRules"
    if not rules and len(old) < 2:
        yield f"{path}: give deletionRules, or both onSuccess and onFailure"
    if rules and shutdown:
        yield f"{path}.deletionRules does not go with shutdownAfterJobFinishes: true"
    for i, rule in enumerate(rules or ()):
        if len({"jobStatus", "jobDeploymentStatus"} & rule.get("condition", {}).keys()) != 1:
            yield f"{path}.deletionRules[{i}].condition: exactly one of jobStatus and jobDeploymentStatus"


def _env(container: Spec) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container.get("env", ())}


def _version(cluster: Spec) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", cluster.get("rayVersion", ""))[:2])
