"""The coordinator as an actor. `run` blocks in one thread; `stop` and `observations` answer meanwhile in another.

What the run has to tell is queued here and fetched by the driver, which writes the run folder: one process owns the
files, and it is the one that outlives Ray.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from actors.clients import (
    RayDrafterClient,
    RayEnergyClient,
    RayPolicyClient,
    RayRewardClient,
    RayRolloutClient,
    RayWaiter,
)
from services.config.schema import ClusterConfig
from services.coordinator.coordinator import Coordinator
from services.coordinator.diagnosis import Diagnosis
from services.coordinator.resume import Takeover
from services.coordinator.services import Inputs, Services
from services.core.energy import GpuName
from services.core.types import ProgressView
from services.policy.advantage import advantages

Observation = tuple[str, tuple[Any, ...]]


class QueuedObserver:
    """A RunObserver that queues (method, arguments); a view of the progress replaces the one before it."""

    def __init__(self) -> None:
        self._queue: deque[Observation] = deque()

    def __getattr__(self, method: str) -> Any:
        return lambda *args: self._queue.append((method, args))

    def take(self) -> list[Observation]:
        return [self._queue.popleft() for _ in range(len(self._queue))]


def ray_services(config: ClusterConfig, handles: Mapping[str, Any]) -> Services:
    """Clients of the actors by name; waits for the drafter's initial state."""
    slots = range(config.rollout.num_servers)
    names = [f"drafter-{slot}" for slot in slots if f"drafter-{slot}" in handles]
    drafters = [RayDrafterClient(name, handles[name]) for name in names]
    initial = None
    if drafters:
        pending, initial = drafters[0].initial_state()
        pending.result(config.coordinator.start_timeout_s)
    return Services(
        rollout=[RayRolloutClient(f"rollout-{slot}", handles[f"rollout-{slot}"]) for slot in slots],
        drafters=drafters,
        policy=RayPolicyClient("policy", handles["policy"], config.weights.transport == "collective"),
        reward=RayRewardClient("reward", handles["reward"]),
        waiter=RayWaiter(),
        initial_drafter=initial,
        advantages=advantages,
    )


class CoordinatorActor:
    """`handles` are the actors by name: rollout-<slot>, drafter-<slot>, policy, reward. `takeover`: the run goes on
    that a coordinator before this one began."""

    def __init__(
        self, config: ClusterConfig, inputs: Inputs, handles: dict[str, Any], takeover: Takeover | None = None
    ) -> None:
        services = ray_services(config, handles)
        self._observer = QueuedObserver()
        self._coordinator = Coordinator(config, inputs, services, self._observer, time.monotonic, takeover)

    def process_id(self) -> int:
        return os.getpid()

    def measure_energy(self, meters: dict[str, Any], users: dict[str, tuple[GpuName, ...]]) -> None:
        """Before `run`. `meters` are energy actors by name."""
        self._coordinator.measure_energy([RayEnergyClient(name, handle) for name, handle in meters.items()], users)

    def run(self) -> dict[str, Any]:
        return self._coordinator.run()

    def stop(self) -> None:
        self._coordinator.stop()

    def progress(self) -> ProgressView:
        return self._coordinator.latest()

    def diagnosis(self) -> Diagnosis:
        return self._coordinator.diagnosis()

    def observations(self) -> list[Observation]:
        """What happened since the last call, in order."""
        return self._observer.take()

    def published_drafter(self) -> tuple[int, list[Any]] | None:
        """(version, [reference to its trainable tensors]); the list keeps Ray from resolving it on the way."""
        published = self._coordinator.published_drafter
        return None if published is None else (published.version, [published.blob])
