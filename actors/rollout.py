"""The rollout server of one slot as an actor: builds the service and delegates."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from actors.clients import RayWaiter, ask_for_transfer
from actors.energy import GpuSeat, own_seat
from services.config.schema import ClusterConfig
from services.core.gain import ExpectedGain, Workload
from services.core.selector import SelectorState
from services.core.types import (
    GroupWork,
    HiddenStateChunk,
    MemorySwitch,
    PartialRollout,
    ServedVersions,
    ServerReport,
)
from services.models.hidden import HiddenStates
from services.rollout.service import build_rollout_service
from services.weights.receive import build_inbox
from services.weights.rendezvous import Offer


class RolloutActor:
    def __init__(self, config: ClusterConfig, slot: int) -> None:
        self._service = build_rollout_service(config, slot)
        self._inbox = build_inbox(
            config, f"rollout-{slot}", ray.util.get_node_ip_address(), ask_for_transfer, RayWaiter()
        )

    def process_id(self) -> int:
        return os.getpid()

    def gpu_seat(self) -> GpuSeat:
        return own_seat()

    def open_epoch(self, epoch: int) -> ServedVersions:
        return self._service.open_epoch(epoch)

    def submit(self, work: Sequence[GroupWork], epoch: int) -> None:
        self._service.submit(work, epoch)

    def withdraw(self, rollout_ids: Sequence[str], epoch: int) -> tuple[PartialRollout, ...]:
        return self._service.withdraw(rollout_ids, epoch)

    def advance(self, budget_s: float, epoch: int) -> ServerReport:
        return self._service.advance(budget_s, epoch)

    def submit_and_advance(self, work: Sequence[GroupWork], budget_s: float, epoch: int) -> ServerReport:
        return self._service.submit_and_advance(work, budget_s, epoch)

    def load_policy(self, version: int, weights: Mapping[str, Any] | Offer, epoch: int) -> ServedVersions:
        if isinstance(weights, Offer):
            return self._service.receive_policy(version, self._inbox.open(weights), epoch)
        return self._service.load_policy(version, weights, epoch)

    def load_drafter(self, version: int, tensors: Mapping[str, Any], epoch: int) -> ServedVersions:
        return self._service.load_drafter(version, tensors, epoch)

    def take_states(self, step: int, epoch: int) -> tuple[HiddenStateChunk, list[HiddenStates]]:
        return self._service.take_states(step, epoch)

    def predict_gain(self, work: Workload) -> ExpectedGain | None:
        return self._service.predict_gain(work)

    def selector_state(self) -> SelectorState | None:
        return self._service.selector_state()

    def restore_selector(self, state: SelectorState, epoch: int) -> bool:
        return self._service.restore_selector(state, epoch)

    def switch_memory(self, release: bool, epoch: int) -> MemorySwitch | None:
        return self._service.switch_memory(release, epoch)

    def set_strategy(self, name: str | None, epoch: int) -> None:
        self._service.set_strategy(name, epoch)
