"""Rendered trees: green for every preset and overlay, and what they promise is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.fitting import Room, misfits
from deploy.k8s.house_rules import pod_templates
from deploy.k8s.kustomize import build
from deploy.k8s.options import OVERLAYS, RenderOptions
from deploy.k8s.ray_objects import RAY_VERSION
from deploy.k8s.render import write_tree
from deploy.k8s.tree import render_tree
from deploy.k8s.validate import check_stream, validate_path
from deploy.placement import HEAD, POLICY, ROLLOUT, role_selector
from deploy.serve import LiveArguments
from deploy.serving import APPLICATION, MODEL, ServeArguments
from deploy.serving_source import ModelSource
from services.config.load import load_config, parse_config
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError
from tests.deploy.k8s.trees import PRESETS, ROOT, manifests_of, one, tree_of

GPU = "reasoner-sglang"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_overlay_of_every_preset_has_no_mistakes(preset: str, tmp_path: Path) -> None:
    write_tree(tree_of(preset), tmp_path)
    report = validate_path(tmp_path)
    assert not report.findings, "\n".join(map(str, report.findings))
    names = {Path(source).name for source, _ in report.checked}
    assert names == {"base", "monitoring", *OVERLAYS}


def test_what_the_repository_ships_is_what_is_rendered(tmp_path: Path) -> None:
    """`longtail k8s render reasoner-sglang --out k8s` wrote k8s/: whoever changes the code renders it again."""
    shipped = ROOT / "k8s"
    for path, text in tree_of(GPU).items():
        assert (shipped / path).read_text(encoding="utf-8") == text, f"k8s/{path} differs: render again"
    files = {f.relative_to(shipped).as_posix() for f in shipped.rglob("*") if f.is_file()}
    assert files - set(tree_of(GPU)) == {"README.md", "longtail-k8s.txt"}


def test_a_retried_job_goes_on_and_a_failing_one_is_not_run_three_times() -> None:
    """Pitfalls 70 and 71: the submitter never submits again, and a new try, which is a new RayCluster after a lost
    head, runs the same id on the same volume."""
    job = one(manifests_of(GPU, "job"), "RayJob")["spec"]
    assert job["submitterConfig"] == {"backoffLimit": 0}
    assert job["backoffLimit"] == 1, "at most two tries"
    assert job["entrypoint"] == "longtail train /etc/longtail/config.yaml run.id=reasoner-sglang"
    config = shipped_config(GPU)
    assert config.run.dir == Path("/data/runs")
    for _, template in pod_templates(one(manifests_of(GPU, "job"), "RayJob")):
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        if "data" in volumes:
            assert volumes["data"]["persistentVolumeClaim"]["claimName"] == "longtail-data"


def shipped_config(preset: str, *overrides: str) -> ClusterConfig:
    data = one(manifests_of(preset, "job", *overrides), "ConfigMap")["data"]["config.yaml"]
    return parse_config(data, "config.yaml")


@pytest.mark.parametrize("preset", PRESETS)
def test_the_pods_hold_the_configuration_they_mount(preset: str) -> None:
    spec = one(manifests_of(preset, "job"), "RayJob")["spec"]["rayClusterSpec"]
    rooms = [
        Room(g["groupName"], {"CPU": int(start["num-cpus"]), "GPU": int(start["num-gpus"])}, g["labels"])
        for g in spec["workerGroupSpecs"]
        for start in [g["rayStartParams"]] * g["replicas"]
    ]
    config = shipped_config(preset)
    assert list(misfits(config, rooms)) == []
    assert config.placement.address == "auto"
    labels = [g["labels"].items() for g in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    for role in (HEAD, ROLLOUT, POLICY):
        selector = role_selector(config, role).items()
        assert selector and any(selector <= has for has in labels), f"no Ray node takes the role {role}"


def test_gpu_limits_equal_what_ray_hands_out() -> None:
    """Pitfall 72: Ray counts the machine's GPUs where nobody tells it the pod's."""
    settings = ("placement.gpus_per_slot=2", "placement.policy_gpus=4", "rollout.num_servers=3")
    spec = one(manifests_of("pocket-demo", "job", *settings), "RayJob")["spec"]["rayClusterSpec"]
    found = {}
    for group in spec["workerGroupSpecs"]:
        resources = group["template"]["spec"]["containers"][0]["resources"]
        assert resources["limits"] == resources["requests"]
        found[group["groupName"]] = (
            group["replicas"],
            int(resources["limits"]["nvidia.com/gpu"]),
            int(group["rayStartParams"]["num-gpus"]),
        )
    assert found == {"rollout": (3, 2, 2), "policy": (1, 4, 4)}
    assert spec["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"


def test_all_metrics_ports_are_declared_and_scraped(tmp_path: Path) -> None:
    """Pitfall 73: two of the head's three exporters are forgotten by the usual PodMonitor."""
    wanted = {"metrics": 8080, "as-metrics": 44217, "dash-metrics": 44227, "longtail": 9464}
    head = one(manifests_of(GPU, "job"), "RayJob")["spec"]["rayClusterSpec"]["headGroupSpec"]
    ports = {p["name"]: p["containerPort"] for p in head["template"]["spec"]["containers"][0]["ports"]}
    assert wanted.items() <= ports.items()
    monitors = {m["metadata"]["name"]: m["spec"] for m in in_file(GPU, "monitoring/pod-monitors.yaml")}
    scraped = {e["port"]: e["interval"] for e in monitors["longtail-head"]["podMetricsEndpoints"]}
    assert scraped.keys() == wanted.keys()
    assert [e["port"] for e in monitors["longtail-workers"]["podMetricsEndpoints"]] == ["metrics"]
    labels = head["template"]["metadata"]["labels"] | {"ray.io/node-type": "head"}  # the latter by the operator
    assert monitors["longtail-head"]["selector"]["matchLabels"].items() <= labels.items()
    allowed = next(p for p in in_file(GPU, "base/network-policies.yaml") if "prometheus" in p["metadata"]["name"])
    assert {p["port"] for p in allowed["spec"]["ingress"][0]["ports"]} == set(wanted.values())


def in_file(preset: str, path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(tree_of(preset)[path]))


def test_http_mode_has_no_submitter() -> None:
    job = one(manifests_of(GPU, "job-http"), "RayJob")["spec"]
    assert job["submissionMode"] == "HTTPMode"
    assert not {"submitterPodTemplate", "submitterConfig"} & job.keys()


@pytest.mark.parametrize(
    ("overlay", "label"), [("job-kueue", "kueue.x-k8s.io/queue-name"), ("job-volcano", "volcano.sh/queue-name")]
)
def test_queues_know_the_job_by_its_label(overlay: str, label: str) -> None:
    assert one(manifests_of(GPU, overlay), "RayJob")["metadata"]["labels"][label] == "longtail"


@pytest.mark.parametrize("overlay", ["job", "cluster", "service", "serving"])
def test_the_gcs_survives_on_redis_in_every_kind(overlay: str, tmp_path: Path) -> None:
    """Ships with cluster and service; a job may add it."""
    write_tree(tree_of(GPU), tmp_path)
    folder = tmp_path / "overlays" / "mine"
    folder.mkdir()
    added = ["../../components/gcs-fault-tolerance"] if overlay == "job" else []
    content = {"resources": [f"../{overlay}"], "components": added}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    text = build(folder)
    assert check_stream(text, "mine")[1] == []
    manifests = list(yaml.safe_load_all(text))
    (ray,) = [m for m in manifests if m["apiVersion"] == "ray.io/v1"]
    spec = ray["spec"].get("rayClusterSpec") or ray["spec"].get("rayClusterConfig") or ray["spec"]
    address = spec["gcsFaultToleranceOptions"]["redisAddress"]
    redis = one(manifests, "Service")
    assert address == f"{redis['metadata']['name']}:{redis['spec']['ports'][0]['port']}"


@pytest.mark.parametrize("overlay", ["cluster", "service", "serving"])
def test_autoscaler_v2_and_token_authentication(overlay: str) -> None:
    (ray,) = [m for m in manifests_of(GPU, overlay) if m["apiVersion"] == "ray.io/v1"]
    spec = ray["spec"].get("rayClusterConfig") or ray["spec"]
    assert (spec["enableInTreeAutoscaling"], spec["autoscalerOptions"]["version"]) == (True, "v2")
    assert spec["authOptions"] == {"mode": "token"}
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    assert {g["template"]["spec"]["restartPolicy"] for g in pods} == {"Never"}
    # Only the head's autoscaler calls the Kubernetes API.
    assert [g["template"]["spec"]["automountServiceAccountToken"] for g in pods] == [True] + [False] * (len(pods) - 1)


def test_the_serve_configs_are_what_the_applications_take() -> None:
    """They travel as text that only the application itself reads."""
    for overlay, model in (("service", LiveArguments), ("serving", ServeArguments)):
        service = one(manifests_of(GPU, overlay), "RayService")
        (app,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
        args = model.model_validate(app["args"])
        if isinstance(args, ServeArguments):
            (model_server,) = app["deployments"]
            assert ModelSource.model_validate(model_server["user_config"]) == args.source
            assert (app["name"], model_server["name"]) == (APPLICATION, MODEL)
            (worker,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
            assert (worker["minReplicas"], worker["maxReplicas"]) == (args.min_replicas, args.max_replicas)


def test_budgets_protect_the_head_and_the_policy_trainer() -> None:
    manifests = manifests_of("pocket-demo", "job")
    templates = [t["metadata"]["labels"] for _, t in pod_templates(one(manifests, "RayJob"))]
    budgets = [m for m in manifests if m["kind"] == "PodDisruptionBudget"]
    for budget in budgets:
        chosen = budget["spec"]["selector"]["matchLabels"].items()
        assert len([labels for labels in templates if chosen <= labels.items()]) == 1
    assert len(budgets) == 2


def test_everything_is_refused_that_is_not_named() -> None:
    policies = {p["metadata"]["name"]: p["spec"] for p in in_file(GPU, "base/network-policies.yaml")}
    deny = policies["longtail-deny"]
    assert deny["policyTypes"] == ["Ingress", "Egress"] and not {"ingress", "egress"} & deny.keys()
    for _, template in pod_templates(one(manifests_of(GPU, "job"), "RayJob")):
        assert deny["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_files_of_the_run_are_told_where_they_must_lie() -> None:
    assert shipped_config(GPU).model.path == "/data/models/reasoner/target"
    told = " ".join(tree_of(GPU)["overlays/job/rayjob.yaml"].replace("\n# ", " ").split())
    assert "Copy models/reasoner/target to /data/models/reasoner/target on the volume longtail-data." in told
    config = shipped_config("pocket-tiny", "data.source={type: file, path: sums.jsonl}")
    assert str(getattr(config.data.source, "path", "")) == "/data/sums.jsonl"
    assert config.model.path == "pocket"


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("drafter.spill_dir=/scratch/states", "/data or /cache or /tmp"),
        ("drafter.checkpoint_dir=/tmp/x", "under /data"),
    ],
)
def test_folders_that_pods_cannot_use_are_refused(setting: str, place: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting.partition('=')[2]} is not writable in a pod: .*{place}"):
        tree_of("pocket-tiny", setting)


def test_the_image_is_named_once(tmp_path: Path) -> None:
    config = load_config(ROOT / "deploy/presets/pocket-tiny.yaml")
    digest = f"sha256:{'a' * 64}"
    for image in ("reg.example:5000/team/longtail:1.2", f"longtail@{digest}"):
        write_tree(render_tree(config, RenderOptions("tiny", image)), tmp_path / image[:3])
        for overlay in ("job", "cluster", "service"):
            built = build(tmp_path / image[:3] / "overlays" / overlay)
            images = {line.split("image: ")[1] for line in built.splitlines() if " image: " in line}
            assert images - {i for i in images if i.startswith("redis:")} == {image}


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"run_id": "My_Run"}, "--run-id"),
        ({"run_id": "r" * 48}, "at most 47"),
        ({"run_id": "run", "namespace": "A"}, "namespace 'A'"),
        ({"run_id": "run", "image": "a b"}, "registry/name:tag"),
        ({"run_id": "run", "retries": -1}, "0 or more"),
    ],
)
def test_options_are_checked(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        RenderOptions(**options)


def test_rendering_again_removes_what_is_no_longer_written_and_nothing_else(tmp_path: Path) -> None:
    write_tree({"a/one.yaml": "1\n", "two.yaml": "2\n"}, tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("kept", encoding="utf-8")
    write_tree({"two.yaml": "3\n"}, tmp_path / "out")
    assert {f.name for f in (tmp_path / "out").rglob("*") if f.is_file()} == {
        "two.yaml",
        "mine.txt",
        "longtail-k8s.txt",
    }
    with pytest.raises(ConfigError, match="did not write"):
        write_tree({"two.yaml": "3\n"}, tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        write_tree({}, tmp_path / "out" / "mine.txt")


def test_ray_is_the_version_that_is_pinned() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={RAY_VERSION}" in pins
