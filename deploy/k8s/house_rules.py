"""What neither schema nor operator refuses, and yet goes wrong on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deploy.k8s.operator_rules import Spec, groups_of, job_spec, ray_clusters, ray_container
from deploy.k8s.pods import AUTOSCALER_METRICS, DASHBOARD_METRICS, GPU, METRICS
from deploy.k8s.quantity import amount

_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_KUEUE_GROUPS = 7
_HEAD_PORTS = {"metrics": METRICS, "as-metrics": AUTOSCALER_METRICS, "dash-metrics": DASHBOARD_METRICS}


def house_problems(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Of one manifest that its schema accepts."""
    if manifest["apiVersion"] == "ray.io/v1":
        for path, cluster in ray_clusters(manifest):
            for problem in _cluster_problems(cluster):
                yield f"{path}.{problem}"
        job = job_spec(manifest)
        if job is not None:
            yield from _job_problems(job)
            if _QUEUE_LABEL in manifest["metadata"].get("labels", {}):
                yield from _kueue_problems(job)
    if manifest["kind"] == "PodDisruptionBudget":
        yield from _budget_problems(manifest["spec"])
    if manifest["kind"] == "PodMonitor":
        yield from _monitor_problems(manifest["spec"])
    for path, template in pod_templates(manifest):
        for problem in _pod_problems(template.get("spec", {})):
            yield f"{path}.spec.{problem}"


def pod_templates(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Spec]]:
    """(path, pod template) of everything that makes pods."""
    if manifest["apiVersion"] == "ray.io/v1":
        for path, cluster in ray_clusters(manifest):
            for where, group in groups_of(cluster):
                yield f"{path}.{where}.template", group["template"]
        job = job_spec(manifest)
        if job is not None and "submitterPodTemplate" in job:
            yield "spec.submitterPodTemplate", job["submitterPodTemplate"]
    elif manifest["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
        yield "spec.template", manifest["spec"]["template"]


def _cluster_problems(cluster: Spec) -> Iterator[str]:
    names = [group["groupName"] for group in cluster.get("workerGroupSpecs", ())]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"workerGroupSpecs: {name!r} names two groups"
    for path, group in groups_of(cluster):
        if group["template"].get("spec", {}).get("containers"):
            needed = _HEAD_PORTS if path == "headGroupSpec" else {"metrics": METRICS}
            yield from (f"{path}.{problem}" for problem in _group_problems(group, needed))


def _group_problems(group: Spec, ports: Mapping[str, int]) -> Iterator[str]:
    container = ray_container(group)
    limits, requests = (container.get("resources", {}).get(k, {}) for k in ("limits", "requests"))
    handed, limit = gpus_of(group), int(amount(limits.get(GPU, 0)))
    if handed is not None and handed != limit:
        yield (
            f"rayStartParams.num-gpus {handed}, but the limit {GPU} is {limit}: Ray would hand out GPUs that the pod "
            "does not have, or leave some idle (pitfall 72): make them equal"
        )
    if handed is None and not limit:
        yield (
            f"rayStartParams.num-gpus is not set and no limit {GPU} is: Ray may count the GPUs of the whole machine "
            '(pitfall 72): set num-gpus: "0"'
        )
    declared = {p.get("name"): p["containerPort"] for p in container.get("ports", ())}
    for name, port in ports.items():
        if declared.get(name) != port:
            yield f"template: the port {name} {port} is not declared, so nothing scrapes it (pitfall 73)"
    store = group.get("rayStartParams", {}).get("object-store-memory", "0")
    memory = amount(requests.get("memory", limits.get("memory", 0)))
    if amount(store) > memory:
        yield f"rayStartParams.object-store-memory {store} exceeds the memory {memory:.0f} that the pod requests"


def gpus_of(group: Spec) -> int | None:
    """What Ray hands out; None where neither place says it, and the operator takes the limit."""
    told = group.get("rayStartParams", {}).get("num-gpus", group.get("resources", {}).get("GPU"))
    return None if told is None else int(amount(told))


def _job_problems(job: Spec) -> Iterator[str]:
    """A script that fails must not run again by itself, and a retry must go on instead of beginning anew."""
    if job.get("submissionMode", "K8sJobMode") == "K8sJobMode" and job.get("submitterConfig") != {"backoffLimit": 0}:
        yield "spec.submitterConfig.backoffLimit must be 0: the submitter would submit twice (pitfall 70)"
    if "backoffLimit" not in job:
        yield "spec.backoffLimit must be set: it says how often a failed run is started again (pitfall 70)"
    if job.get("backoffLimit") and "run.id=" not in job.get("entrypoint", ""):
        yield "spec.entrypoint without run.id=...: a retry would begin a new run instead of going on (pitfall 70)"


def _kueue_problems(job: Spec) -> Iterator[str]:
    cluster = job.get("rayClusterSpec", {})
    if not job.get("shutdownAfterJobFinishes"):
        yield "spec.shutdownAfterJobFinishes must be true: Kueue gives the quota back only then"
    if job.get("clusterSelector"):
        yield "spec.clusterSelector does not go with Kueue: the quota is of the job's own cluster"
    if cluster.get("enableInTreeAutoscaling"):
        yield "spec.rayClusterSpec.enableInTreeAutoscaling does not go with Kueue: the quota is of a fixed size"
    if len(cluster.get("workerGroupSpecs", ())) > _KUEUE_GROUPS:
        yield f"spec.rayClusterSpec.workerGroupSpecs: Kueue takes at most {_KUEUE_GROUPS} groups"


def _budget_problems(spec: Spec) -> Iterator[str]:
    if "maxUnavailable" in spec or isinstance(spec.get("minAvailable"), str):
        yield (
            "spec: Ray's pods have no controller with a scale subresource, so a budget over them must be a whole "
            "number in minAvailable"
        )


def _monitor_problems(spec: Spec) -> Iterator[str]:
    labels = spec.get("selector", {}).get("matchLabels", {})
    if labels.get("ray.io/node-type") != "head":
        return
    missing = _HEAD_PORTS.keys() - {e.get("port") for e in spec.get("podMetricsEndpoints", ())}
    for name in sorted(missing):
        yield f"spec.podMetricsEndpoints: the head's port {name} is not scraped, panels stay empty (pitfall 73)"


def _pod_problems(spec: Spec) -> Iterator[str]:
    """The Pod Security Standard "restricted", a read-only root, and mounts that have a volume."""
    pod = spec.get("securityContext", {})
    # A StatefulSet's claim templates are volumes too, but not of the pod.
    volumes = {v["name"] for v in spec.get("volumes", ())}
    for i, container in enumerate([*spec.get("containers", ()), *spec.get("initContainers", ())]):
        path, own = f"containers[{i}]", container.get("securityContext", {})
        if not own.get("runAsNonRoot", pod.get("runAsNonRoot")):
            yield f"{path}: runAsNonRoot must be true"
        if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{path}: seccompProfile.type must be RuntimeDefault or Localhost"
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{path}.securityContext.allowPrivilegeEscalation must be false"
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"{path}.securityContext.capabilities.drop must be [ALL]"
        if own.get("readOnlyRootFilesystem") is not True:
            yield f"{path}.securityContext.readOnlyRootFilesystem must be true"
        for mount in container.get("volumeMounts", ()):
            if volumes and mount["name"] not in volumes:
                yield f"{path}.volumeMounts: there is no volume {mount['name']!r}, and the operator drops the mount"
        for port in container.get("ports", ()):
            if len(port.get("name", "")) > 15:
                yield f"{path}.ports: the name {port['name']!r} is longer than 15 characters"
