"""The whole system in this process: the same services, the same coordinator, no Ray. For tests and for debugging."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from deploy.inprocess import (
    LocalDrafterClient,
    LocalHost,
    LocalPolicyClient,
    LocalRewardClient,
    LocalRolloutClient,
    LocalService,
)
from deploy.inputs import load_inputs, needs_drafter
from services.config.schema import ClusterConfig
from services.coordinator.coordinator import Coordinator, Services
from services.coordinator.observer import RunObserver
from services.core.protocols import Blob, Clock
from services.drafter.checkpoint import starting_state
from services.drafter.service import build_drafter_service
from services.policy.advantage import advantages
from services.policy.service import build_policy_service
from services.reward.service import RewardService, build_reward_service
from services.rollout.service import build_rollout_service


def run_local(
    config: ClusterConfig,
    observer: RunObserver,
    clock: Clock = time.monotonic,
    on_drafter: Callable[[int, Mapping[str, Any]], None] = lambda version, tensors: None,
) -> dict[str, Any]:
    """One run to its summary. `on_drafter` gets (version, trainable tensors) of the drafter published last.

    Raises what the run raises; the observer is finished in every case.
    """
    inputs = load_inputs(config)
    with ExitStack() as closing:
        services = build_services(config, LocalHost(clock, time.sleep), closing)
        coordinator = Coordinator(config, inputs, services, observer, clock)
        summary = coordinator.run()
        published = coordinator.published_drafter
        if published is not None:
            on_drafter(published.version, published.blob.result(0.0))  # type: ignore[attr-defined]
        return summary


def build_services(
    config: ClusterConfig, host: LocalHost, closing: ExitStack, clock: Clock = time.monotonic
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
        policy=LocalPolicyClient(start("policy", build_policy_service, config, clock)),
        reward=LocalRewardClient(start("reward", reward)),
        waiter=host,
        initial_drafter=Blob(starting_state(config)) if drafter_slots else None,
        advantages=advantages,
    )
