"""The kustomize tree: which file holds what. Pure: from a configuration to texts by path."""

from __future__ import annotations

from deploy.k8s.components import components
from deploy.k8s.config import cluster_config, moved_paths
from deploy.k8s.monitoring import monitoring_tree
from deploy.k8s.options import RenderOptions
from deploy.k8s.ray_objects import ray_cluster, ray_job, ray_service, ray_serving, run_labels
from deploy.k8s.sizing import head_group, serving_group, worker_groups
from deploy.k8s.support import (
    api_server_policy,
    disruption_budgets,
    namespace,
    network_policies,
    volume_claim,
)
from deploy.k8s.text import kustomization, manifest_text
from deploy.placement import HEAD, POLICY
from services.config.load import dump_config
from services.config.schema import ClusterConfig


def render_tree(config: ClusterConfig, options: RenderOptions) -> dict[str, str]:
    """Path below the output folder -> text. Raises ConfigError when the configuration cannot run on pods."""
    return {
        **_base(options),
        **_job(config, options),
        **_job_variants(),
        **_cluster(config, options),
        **_service(config, options),
        **_serving(config, options),
        **components(),
        **monitoring_tree(options.namespace),
    }


def _base(options: RenderOptions) -> dict[str, str]:
    return {
        "base/namespace.yaml": manifest_text(
            "The namespace refuses pods that are not hardened (Pod Security Standard: restricted).",
            namespace(options.namespace),
        ),
        "base/storage.yaml": manifest_text(
            "Run folders with checkpoints, models, prompt sets. Every pod mounts it, so it must be ReadWriteMany. "
            "Edit size and storageClassName, or delete this file and name a claim of your own longtail-data. An object "
            "store works through a CSI driver.",
            volume_claim(),
        ),
        "base/network-policies.yaml": manifest_text(
            "Edit the namespace of Prometheus (monitoring) and of the DNS server (kube-system). Whatever else pods "
            "must reach, such as a model hub, needs a policy of its own.",
            *network_policies(),
        ),
        "base/kustomization.yaml": kustomization(
            "What every overlay stands on.",
            namespace=options.namespace,
            resources=["namespace.yaml", "storage.yaml", "network-policies.yaml"],
        ),
    }


def _job(config: ClusterConfig, options: RenderOptions) -> dict[str, str]:
    run_id = options.run_id
    workers = worker_groups(config, options.slots_per_pod)
    shared = [g.name for g in workers if set(g.roles) >= {"rollout", POLICY}]
    copies = [f"Copy {a} to {b} on the volume longtail-data." for a, b in moved_paths(config)]
    budgets = disruption_budgets(run_id, run_labels(run_id), (HEAD, POLICY))
    return {
        "overlays/job/config.yaml": dump_config(cluster_config(config)),
        "overlays/job/rayjob.yaml": manifest_text(
            " ".join(
                [
                    "One training run. A lost head ends the try; the next one is a new RayCluster in which the run "
                    "goes on from its checkpoint, because its run.id stays. To start another run, render with another "
                    "--run-id. GPU limit and num-gpus of a group must be equal. Node selectors go into the templates."
                ]
                + ["The slots and the policy trainer share one GPU, so they share one pod."] * bool(shared)
                + copies
            ),
            ray_job(run_id, head_group(config), workers, options.retries),
        ),
        "overlays/job/disruption-budgets.yaml": manifest_text(
            "A drained node waits for these two pods: their eviction costs all work since the last checkpoint.",
            *budgets,
        ),
        "overlays/job/kustomization.yaml": kustomization(
            "kubectl apply -k . starts the run; the operator's submitter pod submits it (K8sJobMode).",
            namespace=options.namespace,
            resources=["../../base", "rayjob.yaml", "disruption-budgets.yaml"],
            configMapGenerator=[
                # No hash in the name: kustomize does not know where a RayJob refers to it.
                {"name": f"{run_id}-config", "files": ["config.yaml"], "options": {"disableNameSuffixHash": True}}
            ],
            images=options.images,
        ),
    }


def _job_variants() -> dict[str, str]:
    variants = {
        "http": (
            "http-mode",
            "The operator submits the run itself (HTTPMode): no submitter pod, its log is not followed.",
        ),
        "kueue": ("kueue", "The run waits in Kueue's queue until its quota has room for all pods."),
        "volcano": ("volcano", "Volcano starts all pods of the run or none."),
    }
    return {
        f"overlays/job-{name}/kustomization.yaml": kustomization(
            about, resources=["../job"], components=[f"../../components/{component}"]
        )
        for name, (component, about) in variants.items()
    }


def _cluster(config: ClusterConfig, options: RenderOptions) -> dict[str, str]:
    workers = worker_groups(config, options.slots_per_pod)
    return {
        "overlays/cluster/raycluster.yaml": manifest_text(
            "For development: port-forward service/longtail-dev-head-svc 8265 and submit runs with ray job submit, "
            "placement.address=auto and placement.role_labels=true. RAY_AUTH_TOKEN is in the Secret longtail-dev, key "
            "auth_token. The autoscaler adds pods when a second run of this size comes, and takes them away again.",
            ray_cluster(head_group(config), workers),
        ),
        **_autoscaled("cluster", "raycluster.yaml", "A cluster for development; its GCS survives its head.", options),
    }


def _service(config: ClusterConfig, options: RenderOptions) -> dict[str, str]:
    return {
        "overlays/service/rayservice.yaml": manifest_text(
            "The page of the runs on the volume, read-only: port-forward service/longtail-page-serve-svc 8000. Put the "
            "names under which people reach it into allow_hosts.",
            ray_service(head_group(config), options.namespace),
        ),
        **_autoscaled("service", "rayservice.yaml", "The page of the runs; its GCS survives its head.", options),
    }


def _serving(config: ClusterConfig, options: RenderOptions) -> dict[str, str]:
    return {
        "overlays/serving/rayservice.yaml": manifest_text(
            "The policy and the drafter of a run on the volume behind the OpenAI API: port-forward "
            "service/longtail-serving-serve-svc 8000. Token: kubectl create secret generic longtail-serving "
            "--from-literal=token=$(openssl rand -hex 24). To swap to another checkpoint, edit user_config: args start "
            "other replicas.",
            ray_serving(head_group(config), serving_group(config), options.run_id),
        ),
        **_autoscaled(
            "serving", "rayservice.yaml", "A model behind the OpenAI API; its GCS survives its head.", options
        ),
    }


def _autoscaled(overlay: str, file: str, about: str, options: RenderOptions) -> dict[str, str]:
    return {
        f"overlays/{overlay}/api-server.yaml": manifest_text(
            "Put your API server's address in the place of 0.0.0.0/0.", api_server_policy()
        ),
        f"overlays/{overlay}/kustomization.yaml": kustomization(
            about,
            namespace=options.namespace,
            resources=["../../base", file, "api-server.yaml"],
            components=["../../components/gcs-fault-tolerance"],
            images=options.images,
        ),
    }
