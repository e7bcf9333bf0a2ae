"""From a configuration to the pods that hold its actors: pure arithmetic.

A pod is a Ray node. A slot's GPUs are on one pod, as Ray wants them; slots that share a GPU share the pod.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.inputs import needs_drafter
from deploy.placement import HEAD, POLICY, ROLLOUT
from services.config.schema import ClusterConfig
from services.core.errors import ConfigError

GIB = 2**30
# Host memory of the processes themselves, rounded up from what runs took: a slot holds an engine and a drafter trainer;
# with a GPU each of them maps CUDA and stages weights.
_SLOT_BYTES = {False: 3 * GIB, True: 24 * GIB}
_POLICY_BYTES = {False: 4 * GIB, True: 48 * GIB}
_HEAD_BYTES = 6 * GIB  # GCS, dashboard, driver, coordinator, reward workers
_RAYLET_BYTES = GIB
_WORKERS_PER_POD = 8  # a usual machine's GPUs, between which gradients and weights travel faster than over a network
_ROUNDING = 1e-6  # 0.4 + 0.4 + 0.2 is one GPU


@dataclass(frozen=True, slots=True)
class Group:
    """`pods` equal pods. `cpus` and `gpus`: what Ray hands out on each; `memory`, `object_store`: bytes of each, the
    object store within the memory. `roles`: which actors may be placed here."""

    name: str
    roles: tuple[str, ...]
    pods: int
    cpus: int
    gpus: int
    memory: int
    object_store: int

    @property
    def cpu_limit(self) -> int:
        """One more than Ray hands out, for the raylet and its agents. The head hands out none, but drives the run."""
        return self.cpus + (4 if HEAD in self.roles else 1)


def head_group(config: ClusterConfig) -> Group:
    store = config.placement.object_store_bytes
    return Group("head", (HEAD,), 1, 0, 0, _HEAD_BYTES + _RAYLET_BYTES + store, store)


def worker_groups(config: ClusterConfig, slots_per_pod: int = 1) -> tuple[Group, ...]:
    """`slots_per_pod` is for slots of whole GPUs or of none. Raises ConfigError where they cannot be laid out so."""
    place = config.placement
    if place.mode == "local":
        raise ConfigError("placement.mode: local runs in one process and has no pods: set placement.mode: ray")
    if slots_per_pod < 1:
        raise ConfigError(f"{slots_per_pod} slots per pod: give at least 1")
    if place.colocated:
        return (_colocated(config),)
    if 0 < place.gpus_per_slot < 1:
        if slots_per_pod > 1:
            raise ConfigError(
                f"placement.gpus_per_slot {place.gpus_per_slot:g}: slots that share a GPU share a pod already; "
                "leave slots per pod at 1"
            )
        if _all_on_one_gpu(config):
            return (_shared(config, gpus=1),)
        slots_per_pod = int((1 + _ROUNDING) / place.gpus_per_slot)
    return _rollout(config, min(slots_per_pod, config.rollout.num_servers)), _policy(config)


def serving_group(config: ClusterConfig) -> Group:
    """Pods of one model server each; beside it there is room for the HTTP side."""
    place = config.placement
    cpus, gpus = _whole(place.cpus_per_slot) + 1, _whole(place.gpus_per_slot)
    return _group(config, "serving", ("serving",), 2, cpus, gpus, _SLOT_BYTES[gpus > 0])


def _all_on_one_gpu(config: ClusterConfig) -> bool:
    place = config.placement
    wanted = config.rollout.num_servers * place.gpus_per_slot + place.policy_workers * place.policy_gpus
    return place.policy_gpus > 0 and wanted <= 1 + _ROUNDING


def _rollout(config: ClusterConfig, slots: int) -> Group:
    place = config.placement
    gpus = _whole(slots * place.gpus_per_slot)
    pods = math.ceil(config.rollout.num_servers / slots)
    cpus = max(1, _whole(slots * place.cpus_per_slot))
    return _group(config, "rollout", (ROLLOUT,), pods, cpus, gpus, slots * _slot_bytes(config))


def _policy(config: ClusterConfig) -> Group:
    """As few pods as hold the workers, with equally many in each."""
    place = config.placement
    pods = math.ceil(place.policy_workers / _WORKERS_PER_POD)
    workers = math.ceil(place.policy_workers / pods)
    gpus, cpus = _whole(workers * place.policy_gpus), max(1, _whole(workers * place.policy_cpus))
    return _group(config, "policy", (POLICY,), pods, cpus, gpus, workers * _POLICY_BYTES[gpus > 0])


def _colocated(config: ClusterConfig) -> Group:
    """One pod: Ray finds no other GPUs there to put a policy worker on than those of the slots."""
    if config.rollout.num_servers > _WORKERS_PER_POD:
        raise ConfigError(
            f"rollout.num_servers {config.rollout.num_servers}: slots with a colocated policy share one pod, which has "
            f"at most {_WORKERS_PER_POD} GPUs: lower it, or set placement.policy: split"
        )
    place = config.placement
    return _shared(config, config.rollout.num_servers if place.slots_lie_apart else _whole(place.policy_gpus))


def _shared(config: ClusterConfig, gpus: int) -> Group:
    place, slots, workers = config.placement, config.rollout.num_servers, config.placement.policy_workers
    cpus = max(1, _whole(slots * place.cpus_per_slot + workers * place.policy_cpus))
    memory = slots * _slot_bytes(config) + workers * _POLICY_BYTES[gpus > 0]
    return _group(config, "shared", (ROLLOUT, POLICY), 1, cpus, gpus, memory)


def _group(
    config: ClusterConfig, name: str, roles: tuple[str, ...], pods: int, cpus: int, gpus: int, memory: int
) -> Group:
    store = config.placement.object_store_bytes
    return Group(name, roles, pods, cpus, gpus, memory + _RAYLET_BYTES + store, store)


def _slot_bytes(config: ClusterConfig) -> int:
    return _SLOT_BYTES[config.placement.gpus_per_slot > 0] + sum(_buffers(config))


def _buffers(config: ClusterConfig) -> Iterator[int]:
    engine = config.rollout.engine
    if needs_drafter(config):
        yield config.drafter.buffer_bytes
    if config.drafter.states == "engine":
        yield engine.capture_bytes


def _whole(amount: float) -> int:
    return math.ceil(amount - _ROUNDING)
