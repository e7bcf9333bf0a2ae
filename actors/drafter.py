"""The drafter trainer of one slot as an actor: builds the service and delegates.

Tensors in arguments are views of the object store: read-only, and pinned there while somebody holds them. Methods that
make tensors return them second, so that a caller with `num_returns=2` gets a reference to them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from actors.priority import run_behind_others
from services.config.schema import ClusterConfig
from services.core.types import AcceptanceEstimate, DrafterProgress, HiddenStateChunk
from services.drafter.checkpoint import starting_state
from services.drafter.service import build_drafter_service
from services.drafter.state import DrafterState
from services.models.hidden import HiddenStates


class DrafterActor:
    def __init__(self, config: ClusterConfig, slot: int) -> None:
        self._config = config
        self._service = build_drafter_service(config, slot)

    def process_id(self) -> int:
        return os.getpid()

    def initial_state(self) -> tuple[int, DrafterState]:
        return 0, starting_state(self._config)

    def prepare(self, state: DrafterState) -> None:
        self._service.prepare(state)

    def begin(self, state: DrafterState, epoch: int, lane: int) -> int:
        run_behind_others()  # the thread of this actor's calls: a rollout server beside it must not wait for training
        return self._service.begin(state, epoch, lane)

    def load_target_head(self, policy_version: int, tensors: Mapping[str, Any]) -> None:
        self._service.load_target_head(policy_version, tensors)

    def add_chunk(self, chunk: HiddenStateChunk, tensors: list[HiddenStates]) -> None:
        # Copies: what came lies in the object store, which must not stay pinned by what the buffer keeps.
        self._service.add_chunk(chunk, [h.copied() for h in tensors])

    def train(self, budget_s: float, epoch: int) -> DrafterProgress:
        return self._service.train(budget_s, epoch)

    def interrupt(self, epoch: int) -> None:
        self._service.interrupt(epoch)

    def snapshot(self, epoch: int) -> tuple[int, DrafterState]:
        return self._service.snapshot(epoch)

    def held(self) -> tuple[int, DrafterState | None]:
        return self._service.held()

    def merge(self, micro_steps: tuple[int, ...], *states: DrafterState) -> tuple[int, DrafterState]:
        return self._service.merge(states, micro_steps)

    def checkpoint(self, state: DrafterState) -> None:
        self._service.checkpoint(state)

    def export(self, state: DrafterState) -> tuple[int, dict[str, Any]]:
        return self._service.export(state)

    def estimate(
        self, names: tuple[str, ...], tensors: list[HiddenStates], *states: DrafterState
    ) -> list[AcceptanceEstimate]:
        """States come one by one: Ray resolves references only where they are arguments themselves."""
        return self._service.estimate(dict(zip(names, states, strict=True)), tensors)
