"""`longtail k8s validate`: every manifest of a folder, a file or a stream against schemas and rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.fitting import Room, misfits
from deploy.k8s.house_rules import gpus_of, house_problems
from deploy.k8s.kustomize import build
from deploy.k8s.operator_rules import Spec, operator_problems, ray_clusters, ray_container
from deploy.k8s.quantity import amount
from deploy.k8s.schemas import schema_problems
from services.config.load import parse_config
from services.core.errors import ConfigError

KUSTOMIZATION = "kustomization.yaml"


@dataclass(frozen=True, slots=True)
class Finding:
    """`source`: overlay or file. `manifest`: kind/name."""

    source: str
    manifest: str
    problem: str

    def __str__(self) -> str:
        return f"{self.source}: {self.manifest}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Report:
    checked: tuple[tuple[str, int], ...]  # (source, number of manifests)
    findings: tuple[Finding, ...]


def validate_path(path: Path) -> Report:
    """A file; a folder with a kustomization, which is built; a folder with several below it, each of which is built; or
    a folder of manifests. Raises ConfigError when nothing is there to check."""
    sources = list(_sources(path))
    if not sources:
        raise ConfigError(f"{path} holds no manifests: give a folder with YAML files or kustomizations, a file, or -")
    checked, findings = [], []
    for name, text in sources:
        manifests, found = check_stream(text, name)
        checked.append((name, manifests))
        findings += found
    return Report(tuple(checked), tuple(findings))


def validate_stream(text: str) -> Report:
    manifests, findings = check_stream(text, "stream")
    return Report((("stream", manifests),), tuple(findings))


def _sources(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_file():
        yield str(path), path.read_text(encoding="utf-8")
        return
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist")
    built = [path / KUSTOMIZATION] if (path / KUSTOMIZATION).exists() else sorted(path.rglob(KUSTOMIZATION))
    for file in built:
        if "kind: Component" not in file.read_text(encoding="utf-8"):  # a component has no objects of its own
            yield str(file.parent), build(file.parent)
    if not built:
        for file in sorted(f for f in path.rglob("*") if f.suffix in (".yaml", ".yml")):
            yield str(file), file.read_text(encoding="utf-8")


def check_stream(text: str, source: str) -> tuple[int, list[Finding]]:
    """(number of manifests, findings)."""
    manifests = list(_manifests(text, source))
    if not manifests:
        raise ConfigError(f"{source} holds no manifests")
    findings: list[Finding] = []
    accepted: list[Mapping[str, Any]] = []
    for i, manifest in enumerate(manifests):
        name, problems = _check(manifest, i)
        findings += [Finding(source, name, p) for p in dict.fromkeys(problems)]
        if not problems:
            accepted.append(manifest)
    return len(manifests), findings + [Finding(source, n, p) for n, p in _together(accepted)]


def _manifests(text: str, source: str) -> Iterator[Any]:
    try:
        yield from (document for document in yaml.load_all(text, Loader=_Loader) if document is not None)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """YAML 1.1, as Kubernetes reads it, but a repeated key is an error, as for its strict decoder."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} appears twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _check(manifest: Any, index: int) -> tuple[str, list[str]]:
    """(kind/name, problems). Rules are asked only about manifests of the right shape."""
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(k), str) for k in ("apiVersion", "kind")):
        return f"manifest {index + 1}", ["apiVersion and kind must be there: this is no Kubernetes object"]
    metadata = manifest.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    problems = list(schema_problems(manifest))
    if not problems:
        rules = operator_problems(manifest) if manifest["apiVersion"] == "ray.io/v1" else ()
        problems = [*rules, *house_problems(manifest)]
    return f"{manifest['kind']}/{name}", problems


def _together(manifests: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(kind/name, problem): a job's pods must hold the configuration that it mounts."""
    maps = {m["metadata"]["name"]: m.get("data", {}) for m in manifests if m["kind"] == "ConfigMap"}
    for manifest in manifests:
        if manifest["kind"] != "RayJob":
            continue
        for _, cluster in ray_clusters(manifest):
            for text in _configs(cluster, maps):
                problem = _too_small(cluster, text)
                if problem:
                    yield f"RayJob/{manifest['metadata']['name']}", problem


def _configs(cluster: Spec, maps: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for volume in cluster["headGroupSpec"]["template"]["spec"].get("volumes", ()):
        data = maps.get(volume.get("configMap", {}).get("name", ""), {})
        if "config.yaml" in data:
            yield data["config.yaml"]


def _too_small(cluster: Spec, text: str) -> str | None:
    rooms = []
    for group in cluster.get("workerGroupSpecs", ()):
        limits = ray_container(group).get("resources", {}).get("limits", {})
        cpus = group.get("rayStartParams", {}).get("num-cpus", limits.get("cpu", 0))
        has = {"CPU": float(math.ceil(amount(cpus))), "GPU": float(gpus_of(group) or 0)}
        names = (f"{group.get('groupName')} {i + 1}" for i in range(group.get("replicas", 0)))
        rooms += [Room(name, has, group.get("labels", {})) for name in names]
    try:
        missing = list(misfits(parse_config(text, "config.yaml"), rooms))
    except ConfigError as error:
        missing = [str(error)]
    return f"its pods do not hold its configuration: {'; '.join(missing)}" if missing else None
