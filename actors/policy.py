"""The policy trainer as an actor: builds the service and delegates. Tensors come last, see actors/clients.py.

`send` and `copy_of` run in threads of their own (actors/clients.py's TRANSFERS), also while the policy is trained."""

from __future__ import annotations

import os
from typing import Any

import ray

from actors.energy import GpuSeat, own_seat
from services.config.schema import ClusterConfig
from services.core.checkpoints import CheckpointNote, CheckpointPlan
from services.core.types import HiddenStateChunk, MemorySwitch, PolicyStepReport, TrainBatch
from services.policy.publisher import build_publisher
from services.policy.service import build_policy_service
from services.weights.rendezvous import Invitation, Offer


class PolicyActor:
    def __init__(self, config: ClusterConfig, checkpoints: CheckpointPlan | None = None) -> None:
        self._service = build_policy_service(config, checkpoints=checkpoints)
        self._publisher = build_publisher(config, self._service)

    def process_id(self) -> int:
        return os.getpid()

    def gpu_seat(self) -> GpuSeat:
        return own_seat()

    def train_step(self, batch: TrainBatch) -> tuple[PolicyStepReport, HiddenStateChunk, list[Any]]:
        return self._service.train_step(batch)

    def steps_done(self) -> int:
        return self._service.steps_done

    def publish(self) -> tuple[int, dict[str, Any]]:
        return self._service.publish()

    def switch_memory(self, release: bool) -> MemorySwitch | None:
        return self._service.switch_memory(release)

    def restored(self) -> tuple[CheckpointNote | None, Any, Any]:
        return self._service.restored()

    def checkpoint(self, note: CheckpointNote, live: Any, served: Any) -> None:
        self._service.checkpoint(note, live, served)

    def flush(self, timeout_s: float) -> None:
        self._service.flush(timeout_s)

    def offer(self) -> tuple[int, Offer, dict[str, Any]]:
        return self._publisher.offer(ray.get_runtime_context().current_actor)

    def send(self, version: int, invitation: Invitation) -> None:
        self._publisher.send(version, invitation)

    def copy_of(self, version: int) -> tuple[int, dict[str, Any]]:
        return version, self._publisher.copy_of(version)
