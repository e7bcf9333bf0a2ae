"""`longtail doctor`: every machine of a cluster and what a run would miss there, without starting the run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from deploy.fitting import say
from deploy.node_facts import Gpu
from deploy.preflight import GIB, Finding, Machine, errors, findings
from deploy.session import ray_session
from deploy.survey import survey
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError


def examine(config: ClusterConfig, address: str | None) -> None:
    """Print machines and findings. Raises ConfigError when a run could not start."""
    place = config.placement.model_copy(update={"address": address} if address else {})
    config = config.model_copy(update={"placement": place})
    with ray_session(config, check=False):
        machines = survey(config)
        found = findings(config, machines)
    console = Console()
    for machine in machines:
        tell_machine(console, machine)
    tell(console, found)
    missing = errors(found)
    if missing:
        raise ConfigError(f"{len(missing)} of these would keep the run from starting")


def tell_machine(console: Console, machine: Machine) -> None:
    store = machine.room.resources.get("object_store_memory", 0.0)
    where = f"{machine.name}{' (the driver runs here)' if machine.driver else ''}"
    lines = [f"{where}: {say(machine.room.resources)}, object store {store / GIB:.1f} GiB"]
    if machine.seen is not None:
        seen = machine.seen
        lines[0] += f", memory {seen.memory_bytes / GIB:.1f} GiB"
        lines.append(f"  NVIDIA driver {seen.driver}, CUDA {seen.driver_cuda}" if seen.driver else "  no NVIDIA driver")
        lines += [f"  {gpu.name}{_size(gpu)}" for gpu in seen.gpus]
        lines.append("  " + ", ".join(f"{name} {version}" for name, version in seen.versions.items()))
    labels = {name: value for name, value in machine.room.labels.items() if not name.startswith("ray.io/")}
    lines += [f"  labels {', '.join(f'{name}={value}' for name, value in labels.items())}"] if labels else []
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _size(gpu: Gpu) -> str:
    return "" if gpu.total_bytes is None else f", {gpu.total_bytes / GIB:.0f} GiB"


def tell(console: Console, found: Sequence[Finding]) -> None:
    if not found:
        console.print("nothing is missing")
    for finding in found:
        console.print(f"{finding.level}: {finding}", soft_wrap=True, highlight=False, markup=False)
