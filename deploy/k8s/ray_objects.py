"""RayJob, RayCluster and RayService of KubeRay 1.7."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import yaml

from deploy.k8s.options import IMAGE
from deploy.k8s.pods import (
    CONFIG_DIR,
    DATA,
    NAME_LABEL,
    SERVE,
    Manifest,
    PodOptions,
    container_security,
    pod_security,
    ray_group,
    resources,
)
from deploy.k8s.sizing import GIB, Group

SERVING_NAME = "longtail-serving"  # of the RayService, its application, its token's secret and its PodMonitor
RAY_VERSION = "2.60.0"  # equals constraints.txt, by a test
_INSTANCE = "app.kubernetes.io/instance"


def run_labels(run_id: str) -> dict[str, str]:
    return {_INSTANCE: run_id}


def ray_job(run_id: str, head: Group, workers: tuple[Group, ...], retries: int) -> Manifest:
    """The submitter never submits twice. A retry is a new RayCluster in which the run goes on by its id (pitfall 70):
    `retries` is for lost heads (pitfall 71), and bounds how often a run that fails by itself is started again."""
    options = PodOptions(run_labels(run_id), config_map=f"{run_id}-config")
    command = ["longtail", "train", f"{CONFIG_DIR}/config.yaml", f"run.id={run_id}"]
    spec = {
        "submissionMode": "K8sJobMode",
        "entrypoint": shlex.join(command),
        "backoffLimit": retries,
        "submitterConfig": {"backoffLimit": 0},
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 3600,  # time to look at the logs; the run folder stays on the volume
        "submitterPodTemplate": _submitter(options),
        "rayClusterSpec": _cluster(head, workers, options, autoscale=False),
    }
    return _object("RayJob", run_id, spec, run_labels(run_id))


def ray_cluster(head: Group, workers: tuple[Group, ...]) -> Manifest:
    """For development: `ray job submit` from outside. Holds one run of this size, and grows to two."""
    options = PodOptions(run_labels("longtail-dev"), token=True)
    return _object("RayCluster", "longtail-dev", _cluster(head, workers, options, autoscale=True), options.labels)


def ray_service(head: Group, namespace: str) -> Manifest:
    """The page of the runs on the volume, `deploy.serve:live`: read-only, because the runs are in other Ray clusters,
    whose coordinators it cannot ask."""
    options = PodOptions(run_labels("longtail-page"), serve=True, token=True)
    page = Group("page", ("page",), 1, 2, 0, 4 * GIB, GIB)
    service = "longtail-page-serve-svc"  # the operator's name for it
    application = {
        "name": "live",
        "route_prefix": "/",
        "import_path": "deploy.serve:live",
        # By a name that is not listed the page does not answer (DNS rebinding); port-forward is localhost.
        "args": {"runs_dir": f"{DATA}/runs", "allow_hosts": [service, f"{service}.{namespace}.svc.cluster.local"]},
    }
    serve = {"http_options": {"host": "0.0.0.0", "port": SERVE}, "applications": [application]}
    spec = {
        "serveConfigV2": yaml.safe_dump(serve, sort_keys=False),
        "rayClusterConfig": _cluster(replace(head, object_store=GIB), (page,), options, autoscale=True),
    }
    return _object("RayService", "longtail-page", spec, options.labels)


def ray_serving(head: Group, workers: Group, run_id: str) -> Manifest:
    """The policy and drafter of a run on the volume behind the OpenAI API, `deploy.serving:served`. To swap, edit the
    source in `user_config`: the operator hands it to the replicas that run."""
    secrets = (("LONGTAIL_TOKEN", SERVING_NAME),)
    options = PodOptions(run_labels(SERVING_NAME), serve=True, token=True, secrets=secrets)
    source = {"path": f"{DATA}/runs/{run_id}", "checkpoint": "newest"}
    application = {
        "name": SERVING_NAME,
        "route_prefix": "/",
        "import_path": "deploy.serving:served",
        "args": {"source": source, "min_replicas": workers.pods, "max_replicas": 2 * workers.pods},
        "deployments": [{"name": "model", "user_config": dict(source)}],
    }
    serve = {"http_options": {"host": "0.0.0.0", "port": SERVE}, "applications": [application]}
    spec = {
        "serveConfigV2": yaml.safe_dump(serve, sort_keys=False),
        "rayClusterConfig": _cluster(replace(head, object_store=GIB), (workers,), options, autoscale=True),
    }
    return _object("RayService", SERVING_NAME, spec, options.labels)


def _object(kind: str, name: str, spec: Manifest, labels: dict[str, str]) -> Manifest:
    metadata = {"name": name, "labels": {**NAME_LABEL, **labels}}
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": metadata, "spec": spec}


def _cluster(head: Group, workers: tuple[Group, ...], options: PodOptions, autoscale: bool) -> Manifest:
    spec: Manifest = {"rayVersion": RAY_VERSION, "authOptions": {"mode": "token"}}
    if autoscale:
        spec |= {"enableInTreeAutoscaling": True, "autoscalerOptions": _autoscaler()}
    spec["headGroupSpec"] = ray_group(head, options)
    spec["workerGroupSpecs"] = [_workers(group, options, autoscale) for group in workers]
    return spec


def _workers(group: Group, options: PodOptions, autoscale: bool) -> Manifest:
    """A run starts when all its pods are there, so a group never shrinks below them."""
    return {
        "groupName": group.name,
        "replicas": group.pods,
        "minReplicas": group.pods,
        "maxReplicas": 2 * group.pods if autoscale else group.pods,
        **ray_group(group, options),
    }


def _autoscaler() -> Manifest:
    return {
        "version": "v2",
        "idleTimeoutSeconds": 300,
        "securityContext": container_security(),
        "env": [{"name": "HOME", "value": "/tmp"}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "resources": resources("500m", "1Gi"),
    }


def _submitter(options: PodOptions) -> Manifest:
    """KubeRay fills the command in."""
    container: dict[str, Any] = {
        "name": "ray-job-submitter",
        "image": IMAGE,
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
        "resources": resources("500m", "1Gi"),
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {"metadata": {"labels": {**NAME_LABEL, **options.labels}}, "spec": spec}
