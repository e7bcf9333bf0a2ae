"""The coordinator as an actor. `run` blocks in one thread; the other methods answer meanwhile in others.

What the run has to tell is queued here and fetched by the driver, which writes the run folder: one process owns the
files, and it is the one that outlives Ray.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from actors.clients import (
    RayDrafterClient,
    RayEnergyClient,
    RayPolicyClient,
    RayRewardClient,
    RayRolloutClient,
    RayWaiter,
    published_size,
    reachable_host,
)
from actors.garbage import CollectBetweenSteps
from services.config.schema import ClusterConfig
from services.coordinator.control import ControlRequest
from services.coordinator.coordinator import Coordinator
from services.coordinator.cores import shared_cores
from services.coordinator.diagnosis import Diagnosis
from services.coordinator.observer import Fanout
from services.coordinator.resume import Takeover
from services.coordinator.services import Inputs, Services
from services.coordinator.telemetry.exporter import AT_ONCE, open_metrics
from services.core.energy import GpuName
from services.core.types import ProgressView
from services.policy.advantage import advantages

Observation = tuple[str, tuple[Any, ...]]

# Each call gives Python's lock away, and while a thread of Ray's unpacks answers it comes back only after this time,
# Python's own 5 ms otherwise: hundreds of answers at once would hold up the orders, a few at a time.
SWITCH_S = 0.0005


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
        advantages=partial(advantages, algorithm=config.policy.algorithm),
        cores=shared_cores(config),
    )


class CoordinatorActor:
    """`handles` are the actors by name: rollout-<slot>, drafter-<slot>, policy, reward. `takeover`: the run goes on
    that a coordinator before this one began."""

    def __init__(
        self,
        config: ClusterConfig,
        inputs: Inputs,
        handles: dict[str, Any],
        takeover: Takeover | None = None,
        run_id: str = "",
    ) -> None:
        sys.setswitchinterval(SWITCH_S)
        services = ray_services(config, handles)
        self._queue = QueuedObserver()
        size_of = partial(published_size, config.weights.transport == "collective")
        metrics, self._exporter = open_metrics(config, run_id, time.monotonic, size_of, takeover)
        told = [self._queue] if self._exporter is None else [metrics, self._queue]
        observer: Any = Fanout(*told, CollectBetweenSteps())
        self._coordinator = Coordinator(config, inputs, services, observer, time.monotonic, takeover, metrics)
        if self._exporter is not None:
            self._queue.endpoint(reachable_host(self._exporter.host), self._exporter.port)

    def process_id(self) -> int:
        return os.getpid()

    def measure_energy(self, meters: dict[str, Any], users: dict[str, tuple[GpuName, ...]]) -> None:
        """Before `run`. `meters` are energy actors by name."""
        self._coordinator.measure_energy([RayEnergyClient(name, handle) for name, handle in meters.items()], users)

    def run(self) -> dict[str, Any]:
        return self._coordinator.run()

    def stop(self) -> None:
        self._coordinator.stop()

    def control(self, request: ControlRequest) -> str:
        """Raises ControlRefusedError."""
        return self._coordinator.control.ask(request)

    def progress(self) -> ProgressView:
        return self._coordinator.latest()

    def diagnosis(self) -> Diagnosis:
        return self._coordinator.diagnosis()

    def observations(self) -> list[Observation]:
        """What happened since the last call, in order. Calling again says that the answer before arrived."""
        news = self._queue.take()
        if self._exporter is not None:
            self._exporter.acknowledge()
            state = self._exporter.offer(force=any(method in AT_ONCE for method, _ in news))
            if state is not None:
                news.insert(0, ("values", (state,)))
        return news

    def published_drafter(self) -> tuple[int, list[Any]] | None:
        """(version, [reference to its trainable tensors]); the list keeps Ray from resolving it on the way."""
        published = self._coordinator.published_drafter
        return None if published is None else (published.version, [published.blob])
