"""The policy trainer as an actor: builds the service and delegates. Tensors come last, see actors/clients.py."""

from __future__ import annotations

import os
from typing import Any

from actors.energy import GpuSeat, own_seat
from services.config.schema import ClusterConfig
from services.core.checkpoints import CheckpointNote, CheckpointPlan
from services.core.types import HiddenStateChunk, PolicyStepReport, TrainBatch
from services.policy.service import build_policy_service


class PolicyActor:
    def __init__(self, config: ClusterConfig, checkpoints: CheckpointPlan | None = None) -> None:
        self._service = build_policy_service(config, checkpoints=checkpoints)

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

    def restored(self) -> tuple[CheckpointNote | None, Any, Any]:
        return self._service.restored()

    def checkpoint(self, note: CheckpointNote, live: Any, served: Any) -> None:
        self._service.checkpoint(note, live, served)

    def flush(self, timeout_s: float) -> None:
        self._service.flush(timeout_s)
