"""Seeded mistakes are caught, each by the message that names it; what is rendered has none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.k8s.monitoring import pod_monitors
from deploy.k8s.validate import check_stream, validate_path
from services.core.errors import ConfigError
from tests.deploy.k8s.trees import as_stream, manifests_of, one, overlay_text

GPU = "reasoner-sglang"


def problems(*manifests: dict[str, Any]) -> list[str]:
    return [f.problem for f in check_stream(as_stream(*manifests), "test")[1]]


def head(cluster: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = cluster["headGroupSpec"]
    return group


def worker(cluster: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = cluster["workerGroupSpecs"][0]
    return group


def container(group: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = group["template"]["spec"]["containers"][0]
    return first


def drop_ports(group: dict[str, Any], *names: str) -> None:
    container(group)["ports"] = [p for p in container(group)["ports"] if p["name"] not in names]


def limit_gpus(group: dict[str, Any], gpus: int) -> None:
    for side in ("limits", "requests"):
        container(group)["resources"][side]["nvidia.com/gpu"] = str(gpus)


Change = Callable[[dict[str, Any]], object]

# Of the RayCluster, whose autoscaler is v2.
CLUSTER_MISTAKES: list[tuple[str, Change, str]] = [
    ("unknown field", lambda c: c.update(backoffLimits=1), r"spec: unknown field backoffLimits"),
    (
        "misspelt field",
        lambda c: container(worker(c)).update(resource={}),
        r"workerGroupSpecs\[0\].template.spec.containers\[0\]: unknown field resource; did you mean resources\?",
    ),
    ("wrong type", lambda c: worker(c).update(replicas="2"), r"replicas: '2' must be of type integer"),
    ("GPU limit below num-gpus", lambda c: worker(c)["rayStartParams"].update({"num-gpus": "8"}), "pitfall 72"),
    ("GPU limit above num-gpus", lambda c: limit_gpus(worker(c), 4), "num-gpus 1, but the limit nvidia.com/gpu is 4"),
    ("GPUs not told", lambda c: head(c)["rayStartParams"].pop("num-gpus"), "GPUs of the whole machine"),
    (
        "labels to ray start",
        lambda c: worker(c)["rayStartParams"].update(labels="a=b"),
        "rayStartParams.labels is refused",
    ),
    (
        "restart policy of the head",
        lambda c: head(c)["template"]["spec"].update(restartPolicy="Always"),
        r"headGroupSpec.template.spec.restartPolicy Always: autoscaler v2 needs Never",
    ),
    (
        "restart policy of workers",
        lambda c: worker(c)["template"]["spec"].update(restartPolicy="OnFailure"),
        r"workerGroupSpecs\[0\].template.spec.restartPolicy OnFailure",
    ),
    ("no dashboard metrics", lambda c: drop_ports(head(c), "dash-metrics"), "dash-metrics 44227.*pitfall 73"),
    ("no autoscaler metrics", lambda c: drop_ports(head(c), "as-metrics"), "as-metrics 44217.*pitfall 73"),
    ("no worker metrics", lambda c: drop_ports(worker(c), "metrics"), r"workerGroupSpecs\[0\].*metrics 8080"),
    ("resources twice", lambda c: worker(c).update(resources={"GPU": "1"}), "both say what Ray hands out"),
    ("bad label", lambda c: worker(c).update(labels={"a b": "c"}), "not a valid label"),
    ("more pods than allowed", lambda c: worker(c).update(minReplicas=9), "minReplicas 9 exceeds maxReplicas"),
    (
        "old Ray with token",
        lambda c: c.update(rayVersion="2.9.3"),
        "token needs rayVersion 2.52.*it is 2.9.3",
    ),
    (
        "autoscaler told twice",
        lambda c: container(head(c))["env"].append({"name": "RAY_enable_autoscaler_v2", "value": "1"}),
        "are both set: use the former",
    ),
    (
        "Redis told twice",
        lambda c: container(head(c))["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "r"}),
        "RAY_REDIS_ADDRESS beside gcsFaultToleranceOptions",
    ),
    (
        "Redis without the options",
        lambda c: (c.pop("gcsFaultToleranceOptions"), head(c)["rayStartParams"].update({"redis-username": "u"})),
        "redisUsername",
    ),
    ("two groups of one name", lambda c: c["workerGroupSpecs"].append(dict(worker(c))), "names two groups"),
    ("no containers", lambda c: worker(c)["template"]["spec"].update(containers=[]), "at least one"),
    ("root user", lambda c: worker(c)["template"]["spec"].pop("securityContext"), "runAsNonRoot must be true"),
    ("writable root", lambda c: container(head(c))["securityContext"].pop("readOnlyRootFilesystem"), "readOnlyRoot"),
    ("capabilities", lambda c: container(head(c))["securityContext"].pop("capabilities"), r"drop must be \[ALL\]"),
    ("mount without volume", lambda c: worker(c)["template"]["spec"]["volumes"].pop(0), "there is no volume 'data'"),
    (
        "store above memory",
        lambda c: head(c)["rayStartParams"].update({"object-store-memory": "999000000000"}),
        "object-store-memory 999000000000 exceeds",
    ),
    (
        "unknown backend",
        lambda c: c["gcsFaultToleranceOptions"].update(backend="etcd"),
        r"gcsFaultToleranceOptions.backend: 'etcd' is not one of",
    ),
    ("unknown manager", lambda c: c.update(managedBy="me"), "managedBy 'me' must be"),
]


@pytest.mark.parametrize(("change", "message"), [m[1:] for m in CLUSTER_MISTAKES], ids=[m[0] for m in CLUSTER_MISTAKES])
def test_mistake_in_a_cluster_is_caught(change: Change, message: str) -> None:
    cluster = one(manifests_of(GPU, "cluster"), "RayCluster")
    assert problems(cluster) == []
    change(cluster["spec"])
    found = problems(cluster)
    assert any(re.search(message, p) for p in found), found


JOB_MISTAKES: list[tuple[str, Change, str]] = [
    ("submitter tries again", lambda j: j["submitterConfig"].update(backoffLimit=2), "submit twice.*pitfall 70"),
    ("submitter's default", lambda j: j.pop("submitterConfig"), "submitterConfig.backoffLimit must be 0"),
    ("retries not told", lambda j: j.pop("backoffLimit"), "spec.backoffLimit must be set.*pitfall 70"),
    ("retry begins anew", lambda j: j.update(entrypoint="longtail train x.yaml"), "without run.id.*pitfall 70"),
    ("unknown mode", lambda j: j.update(submissionMode="Magic"), "submissionMode 'Magic'"),
    ("no cluster", lambda j: j.pop("rayClusterSpec"), "one of rayClusterSpec and clusterSelector"),
    ("ttl without shutdown", lambda j: j.update(shutdownAfterJobFinishes=False), "ttlSecondsAfterFinished needs"),
    (
        "sidecar with submitter",
        lambda j: j.update(submissionMode="SidecarMode"),
        "submitterPodTemplate does not go with SidecarMode",
    ),
    ("interactive with retries", lambda j: j.update(submissionMode="InteractiveMode"), "0 with clusterSelector"),
    ("no deadline", lambda j: j.update(activeDeadlineSeconds=0), "activeDeadlineSeconds must be above 0"),
    (
        "deletion half told",
        lambda j: j.update(deletionStrategy={"onSuccess": {"policy": "DeleteCluster"}}),
        "or both onSuccess and onFailure",
    ),
    (
        "deletion condition",
        lambda j: j.update(deletionStrategy={"deletionRules": [{"policy": "DeleteCluster", "condition": {}}]}),
        "exactly one of jobStatus and jobDeploymentStatus",
    ),
    (
        "groups without bounds",
        lambda j: worker(j["rayClusterSpec"]).pop("minReplicas"),
        "both minReplicas and maxReplicas",
    ),
    (
        "submitter as root",
        lambda j: j["submitterPodTemplate"]["spec"].pop("securityContext"),
        r"submitterPodTemplate.spec.containers\[0\]: runAsNonRoot",
    ),
]


@pytest.mark.parametrize(("change", "message"), [m[1:] for m in JOB_MISTAKES], ids=[m[0] for m in JOB_MISTAKES])
def test_mistake_in_a_job_is_caught(change: Change, message: str) -> None:
    job = one(manifests_of(GPU, "job"), "RayJob")
    assert problems(job) == []
    change(job["spec"])
    found = problems(job)
    assert any(re.search(message, p) for p in found), found


def test_names_that_the_operator_cannot_lengthen() -> None:
    job = one(manifests_of(GPU, "job"), "RayJob")
    job["metadata"]["name"] = "r" * 48
    assert problems(job) == [f"metadata.name {'r' * 48!r} has 48 characters, a RayJob may have 47"]
    job["metadata"]["name"] = "1run"
    assert "beginning with a letter" in problems(job)[0]


def test_kueue_takes_neither_autoscaling_nor_what_never_ends() -> None:
    job = one(manifests_of(GPU, "job-kueue"), "RayJob")
    job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] = True
    job["spec"] |= {"shutdownAfterJobFinishes": False, "ttlSecondsAfterFinished": 0}
    found = problems(job)
    assert len(found) == 2 and all("Kueue" in p for p in found)


def test_pods_that_do_not_hold_the_configuration() -> None:
    """Pitfall 72: somebody edits the GPU counts, and the run would wait for GPUs that no pod has."""
    manifests = manifests_of("pocket-tiny", "job", "placement.gpus_per_slot=1", "placement.policy_gpus=1")
    job, config = one(manifests, "RayJob"), one(manifests, "ConfigMap")
    assert problems(job, config) == []
    worker(job["spec"]["rayClusterSpec"])["replicas"] = 1
    (found,) = problems(job, config)
    assert "need 3 GPU, the cluster has 2" in found


def test_budget_over_pods_without_a_scale_subresource() -> None:
    budget = next(m for m in manifests_of(GPU, "job") if m["kind"] == "PodDisruptionBudget")
    budget = {**budget, "spec": {**budget["spec"], "minAvailable": "50%"}}
    assert "whole number" in problems(budget)[0]


def test_unknown_and_mistyped_fields_of_kubernetes_own_kinds() -> None:
    claim = one(manifests_of(GPU, "job"), "PersistentVolumeClaim")
    claim["spec"]["accessMode"] = ["ReadWriteMany"]
    assert "accessMode" in problems(claim)[0]
    assert "cannot be checked" in problems({"apiVersion": "x/v1", "kind": "Y", "metadata": {"name": "z"}})[0]
    assert "no Kubernetes object" in problems({"just": "text"})[0]


def test_head_monitor_without_all_ports() -> None:
    """Pitfall 73."""
    monitor = pod_monitors()[0]
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    assert problems(monitor) == []
    monitor["spec"]["podMetricsEndpoints"] = [e for e in endpoints if e["port"] == "metrics"]
    assert ["as-metrics" in p or "dash-metrics" in p for p in problems(monitor)] == [True, True]
    endpoints[0]["prot"] = "metrics"
    monitor["spec"]["podMetricsEndpoints"] = endpoints
    assert problems(monitor) == ["spec.podMetricsEndpoints[0]: unknown field prot; did you mean port?"]


def test_a_repeated_key_and_broken_yaml_are_named() -> None:
    for text, reason in (
        ("kind: A\nkind: B\n", "'kind' appears twice"),
        ("kind: [", "not valid YAML"),
        ("", "no manifests"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_stream(text, "stream")


def test_a_folder_without_manifests_and_one_that_kustomize_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no manifests"):
        validate_path(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        validate_path(tmp_path / "nowhere")
    (tmp_path / "kustomization.yaml").write_text("resources: [missing.yaml]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"kustomize cannot build it: .*missing.yaml"):
        validate_path(tmp_path)


def test_plain_manifests_in_a_folder_are_checked_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(overlay_text("pocket-tiny", "job"), encoding="utf-8")
    bad = one(manifests_of("pocket-tiny", "job"), "RayJob")
    bad["spec"]["entrypont"] = "x"
    (tmp_path / "bad.yml").write_text(as_stream(bad), encoding="utf-8")
    report = validate_path(tmp_path)
    assert [f.problem for f in report.findings] == ["spec: unknown field entrypont; did you mean entrypoint?"]
    assert report.findings[0].source.endswith("bad.yml")
