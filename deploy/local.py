"""The whole system in this process: the same services, the same coordinator, no Ray. For tests and for debugging."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from deploy.inprocess import (
    LocalDrafterClient,
    LocalEnergyClient,
    LocalHost,
    LocalPolicyClient,
    LocalRewardClient,
    LocalRolloutClient,
    LocalService,
)
from deploy.inputs import load_inputs, needs_drafter
from deploy.resuming import Start, nameless_start
from services.config.schema import ClusterConfig
from services.coordinator.coordinator import Coordinator
from services.coordinator.energy import POLICY
from services.coordinator.observer import Fanout, RunObserver
from services.coordinator.services import Services
from services.coordinator.telemetry.exporter import AT_ONCE, Exporter, open_metrics
from services.core.checkpoints import CheckpointPlan
from services.core.energy import GpuName
from services.core.protocols import Blob, Clock
from services.drafter.checkpoint import starting_state
from services.drafter.service import build_drafter_service
from services.energy.nvml import open_nvml
from services.energy.reader import OpenReader
from services.energy.service import EnergyService
from services.models.device import pick_device
from services.policy.advantage import advantages
from services.policy.service import build_policy_service
from services.reward.service import RewardService, build_reward_service
from services.rollout.service import build_rollout_service


def run_local(
    config: ClusterConfig,
    observer: RunObserver,
    clock: Clock = time.monotonic,
    on_drafter: Callable[[int, Mapping[str, Any]], None] = lambda version, tensors: None,
    gpu: str | None = None,
    open_reader: OpenReader = open_nvml,
    start: Start | None = None,
    on_start: Callable[[Coordinator], None] = lambda coordinator: None,
) -> dict[str, Any]:
    """One run to its summary; without `start` a new one that writes no checkpoints. `on_drafter` gets (version,
    trainable tensors) of the drafter published last, `on_start` the coordinator, which takes control requests from
    other threads.
    `gpu`: whose energy is measured, as CUDA_VISIBLE_DEVICES calls it; None: the one that this process computes on.

    Raises what the run raises; the observer is finished in every case.
    """
    start = start or nameless_start()
    config = start.fitted(config)
    inputs = load_inputs(config)
    with ExitStack() as closing:
        host = LocalHost(clock, time.sleep)
        metrics, exporter = open_metrics(config, start.run_id, clock, _num_bytes, start.takeover)
        if exporter is not None:
            closing.callback(exporter.close)
            observer.endpoint(exporter.host, exporter.port)
            observer = Fanout(observer, metrics, _Serving(exporter, observer))  # type: ignore[arg-type]
        services = build_services(config, host, closing, checkpoints=start.checkpoints)
        coordinator = Coordinator(config, inputs, services, observer, clock, start.takeover, metrics)
        entry = gpu or _gpu_in_use(config)
        if entry is not None:
            meter = EnergyService([entry], open_reader, clock)
            closing.callback(meter.close)
            _measure_energy(coordinator, config, host, meter, entry)
        on_start(coordinator)
        summary = coordinator.run()
        published = coordinator.published_drafter
        if published is not None:
            on_drafter(published.version, published.blob.result(0.0))  # type: ignore[attr-defined]
        return summary


class _Serving:
    """Runs along as an observer: whatever happens, the values are kept and served when it is time."""

    def __init__(self, exporter: Exporter, observer: RunObserver) -> None:
        self._exporter, self._observer = exporter, observer

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *args: self._turn(force=method in AT_ONCE)

    def _turn(self, force: bool) -> None:
        state = self._exporter.offer(force)
        if state is not None:
            self._observer.values(state)
            self._exporter.acknowledge()


def _num_bytes(_weights: str, blob: Blob) -> int | None:
    """Of a published version: tensors by name."""
    return sum(tensor.nbytes for tensor in blob.result(0.0).values())  # type: ignore[attr-defined]


def _gpu_in_use(config: ClusterConfig) -> str | None:
    """Everything here computes on torch's current GPU: the first that CUDA_VISIBLE_DEVICES leaves."""
    if pick_device(config.model.device).type != "cuda":
        return None
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def _measure_energy(
    coordinator: Coordinator, config: ClusterConfig, host: LocalHost, meter: EnergyService, entry: str
) -> None:
    client = LocalEnergyClient(LocalService("energy", lambda: meter, host))
    holders = [*(f"slot {i}" for i in range(config.rollout.num_servers)), POLICY]
    coordinator.measure_energy([client], dict.fromkeys(holders, (GpuName(client.name, entry),)))


def build_services(
    config: ClusterConfig,
    host: LocalHost,
    closing: ExitStack,
    clock: Clock = time.monotonic,
    checkpoints: CheckpointPlan | None = None,
) -> Services:
    """Every service of a run on `host`; `clock` is theirs."""

    def reward() -> RewardService:
        service = build_reward_service(config)
        closing.callback(service.close)
        return service

    def start(name: str, build: Callable[..., Any], *args: Any) -> LocalService:
        return LocalService(name, lambda: build(*args), host)

    slots = range(config.rollout.num_servers)
    drafter_slots = slots if needs_drafter(config) else range(0)
    return Services(
        rollout=[LocalRolloutClient(start(f"rollout-{i}", build_rollout_service, config, i, clock)) for i in slots],
        drafters=[
            LocalDrafterClient(start(f"drafter-{i}", build_drafter_service, config, i, clock)) for i in drafter_slots
        ],
        policy=LocalPolicyClient(start("policy", build_policy_service, config, clock, checkpoints)),
        reward=LocalRewardClient(start("reward", reward)),
        waiter=host,
        initial_drafter=Blob(starting_state(config)) if drafter_slots else None,
        advantages=partial(advantages, algorithm=config.policy.algorithm),
    )
