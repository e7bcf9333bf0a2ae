"""What a config needs against what a cluster has: findings with their remedies, as pure functions.

An `error` would end the run, or keep it waiting, after minutes; a `warning` may not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from deploy.fitting import Room, misfits
from deploy.node_facts import Seen
from deploy.placement import POLICY, ROLLOUT, role_label
from services.config.schema import ClusterConfig, SGLangEngine

# From the first version to before the second. A test compares this with pyproject.toml.
SUPPORTED = {
    "python": ((3, 11), (3, 14)),
    "ray": ((2, 60), (2, 61)),
    "torch": ((2, 11), (3,)),
    "sglang": ((0, 5, 17), (0, 5, 18)),
}
MUST_AGREE = ("python", "ray", "torch")  # between machines, to the minor version: objects are pickled
LEAST_FREE_BYTES = 2**30  # for run folder and checkpoints of a small run
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["error", "warning"]
    subject: str
    message: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.message}"


@dataclass(frozen=True, slots=True)
class Machine:
    """One node. `seen` is None when it did not answer, `silent` says why. `driver`: the run's driver is there."""

    room: Room
    seen: Seen | None
    silent: str = ""
    driver: bool = False

    @property
    def name(self) -> str:
        return self.room.name


def findings(config: ClusterConfig, machines: Sequence[Machine]) -> list[Finding]:
    """Errors first. The driver's machine must be among `machines`."""
    answering = [m for m in machines if m.seen is not None]
    found = [
        *(Finding("error", m.name, f"does not answer: {m.silent}") for m in machines if m.seen is None),
        *(Finding("error", "resources", text) for text in misfits(config, [m.room for m in machines])),
        *_versions(config, answering),
        *_gpus(config, answering),
        *_gpu_memory(config, answering),
        *_model(answering),
        *_object_store(answering),
        *_folders(answering),
        *_ports(answering),
    ]
    return sorted(found, key=lambda finding: finding.level)


def errors(found: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.level == "error"]


def _seen(machine: Machine) -> Seen:
    assert machine.seen is not None
    return machine.seen


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+", maxsplit=1)[0])[:3])


def _versions(config: ClusterConfig, machines: Sequence[Machine]) -> Iterator[Finding]:
    home = next((_seen(m).versions for m in machines if m.driver), {})
    for machine in machines:
        versions = _seen(machine).versions
        if "longtail" not in versions:
            yield Finding("error", machine.name, "Longtail is not there: submit with `longtail submit`, or install it")
        for package, (first, end) in SUPPORTED.items():
            version = versions.get(package)
            if version is None:
                if package != "sglang" or _serves_sglang(config, machine):
                    extra = "[sglang]" if package == "sglang" else ""
                    yield Finding("error", machine.name, f"{package} is not installed: pip install longtail-rl{extra}")
            elif not first <= _numbers(version) < end:
                span = f"from {_dotted(first)} to before {_dotted(end)}"
                yield Finding("error", machine.name, f"{package} is {version}, supported is {span}")
        for package in MUST_AGREE:
            here, there = versions.get(package), home.get(package)
            if here and there and _numbers(here)[:2] != _numbers(there)[:2]:
                yield Finding("error", machine.name, f"{package} is {here}, but {there} where the driver runs")


def _serves_sglang(config: ClusterConfig, machine: Machine) -> bool:
    return isinstance(config.rollout.engine, SGLangEngine) and _takes(config, machine, ROLLOUT)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _gpus(config: ClusterConfig, machines: Sequence[Machine]) -> Iterator[Finding]:
    for machine in machines:
        seen, told = _seen(machine), machine.room.resources.get("GPU", 0.0)
        if told and seen.driver is None:
            level: Literal["error", "warning"] = "error" if config.model.device == "cuda" else "warning"
            yield Finding(level, machine.name, f"Ray was told of {told:g} GPUs, but no NVIDIA driver answers there")
        elif told > len(seen.gpus):
            yield Finding(
                "error",
                machine.name,
                f"Ray was told of {told:g} GPUs, but the driver shows {len(seen.gpus)}: start Ray with --num-gpus="
                f"{len(seen.gpus)}; in Kubernetes set it to the container's limit of nvidia.com/gpu",
            )
        if told and seen.driver_cuda and seen.cuda and _numbers(seen.driver_cuda)[:1] < _numbers(seen.cuda)[:1]:
            yield Finding(
                "error",
                machine.name,
                f"driver {seen.driver} runs CUDA {seen.driver_cuda}, torch is built for {seen.cuda}: renew the driver",
            )


def _gpu_memory(config: ClusterConfig, machines: Sequence[Machine]) -> Iterator[Finding]:
    """From the size of the model's files alone: two bytes a weight, or at least a quarter weight per byte."""
    place, engine, workers = config.placement, config.rollout.engine, config.placement.policy_workers
    for machine in machines:
        seen = _seen(machine)
        largest = max((g.total_bytes for g in seen.gpus if g.total_bytes is not None), default=None)
        if largest is None or not seen.model_bytes:
            continue
        state = 0 if config.policy.optimizer_offload else 8 * seen.model_bytes // workers
        if place.policy_gpus and _takes(config, machine, POLICY) and state > largest:
            level: Literal["error", "warning"] = "error" if state > 2 * largest else "warning"
            yield Finding(
                level,
                machine.name,
                "the policy trainer keeps weights, gradients and AdamW's two moments in float32, on each GPU of "
                f"{workers} about {state / GIB:.0f} GiB for this model in bfloat16, the largest GPU here has "
                f"{largest / GIB:.0f}: raise placement.policy_workers, set policy.optimizer_offload: true, or take a "
                "smaller model or a larger GPU",
            )
        if isinstance(engine, SGLangEngine) and _takes(config, machine, ROLLOUT):
            share, room = seen.model_bytes / engine.tp, engine.mem_fraction * largest
            if share > room:
                yield Finding(
                    "error",
                    machine.name,
                    f"an engine holds {share / GIB:.0f} GiB of weights per GPU, rollout.engine.mem_fraction leaves it "
                    f"{room / GIB:.0f}: raise rollout.engine.tp or mem_fraction",
                )


def _takes(config: ClusterConfig, machine: Machine, role: str) -> bool:
    return not config.placement.role_labels or machine.room.labels.get(role_label(role)) == "true"


def _model(machines: Sequence[Machine]) -> Iterator[Finding]:
    home = next((m for m in machines if m.driver), None)
    if home is None or not _seen(home).model_files:
        return  # the model that ships with Longtail, or one that the run itself refuses
    for machine in machines:
        files = _seen(machine).model_files
        if not files:
            yield Finding("error", machine.name, "model.path is not there: copy it, or put it on a shared disk")
        elif files != _seen(home).model_files:
            other = sorted({name for name, _ in set(files) ^ set(_seen(home).model_files)})
            yield Finding(
                "error", machine.name, f"model.path holds other files than where the driver runs: {', '.join(other)}"
            )


def _object_store(machines: Sequence[Machine]) -> Iterator[Finding]:
    """A policy that is being loaded and the next one, beside the drafter's states."""
    for machine in machines:
        size, model = machine.room.resources.get("object_store_memory"), _seen(machine).model_bytes
        if size is None or not model or size >= 2 * model:
            continue
        level: Literal["error", "warning"] = "error" if size < model else "warning"
        yield Finding(
            level,
            machine.name,
            f"the object store holds {size / GIB:.1f} GiB, two policies take {2 * model / GIB:.1f}: start Ray with a "
            "larger --object-store-memory (placement.object_store_bytes on this machine alone)",
        )


def _folders(machines: Sequence[Machine]) -> Iterator[Finding]:
    for machine in machines:
        for folder in _seen(machine).folders:
            if folder.problem:
                yield Finding("error", machine.name, f"{folder.path}: {folder.problem}")
            elif folder.free_bytes < LEAST_FREE_BYTES:
                yield Finding(
                    "warning", machine.name, f"{folder.path} has {folder.free_bytes / GIB:.2f} GiB free: make room"
                )


def _ports(machines: Sequence[Machine]) -> Iterator[Finding]:
    """An earlier driver's coordinator may still be about to leave it, and Ray chooses where the next one starts."""
    for machine in machines:
        for port in _seen(machine).ports_taken:
            yield Finding(
                "warning",
                machine.name,
                f"port {port} (coordinator.metrics.port) is taken: choose another one, or 0 for any",
            )
