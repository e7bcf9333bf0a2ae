"""A whole run on the fakes, in simulated time: what is told of it, and a coordinator that dies in the middle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from deploy.inprocess import (
    LocalDrafterClient,
    LocalHost,
    LocalPolicyClient,
    LocalRewardClient,
    LocalRolloutClient,
    LocalService,
)
from services.config.schema import ClusterConfig
from services.coordinator.coordinator import Coordinator
from services.coordinator.resume import RunMemory
from services.coordinator.services import Inputs, Services
from services.core.protocols import Blob
from services.policy.advantage import advantages
from tests.services.coordinator.fakes import (
    SAMPLING,
    FakeClock,
    FakeDrafter,
    FakePolicy,
    FakeReward,
    FakeRollout,
    make_prompts,
)


@dataclass
class Recorder:
    """A RunObserver that remembers."""

    steps: list[Any] = field(default_factory=list)
    groups: dict[int, Any] = field(default_factory=dict)
    evaluations: list[Any] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    strategies: list[Any] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    views: list[Any] = field(default_factory=list)
    summaries: list[Any] = field(default_factory=list)
    endpoints: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    watch: Callable[[Any], None] = lambda view: None

    def step(self, metrics: Any) -> None:
        self.steps.append(metrics)

    def rollouts(self, step: int, groups: Any) -> None:
        self.groups[step] = groups

    def evaluation(self, result: Any) -> None:
        self.evaluations.append(result)

    def span(self, span: Any) -> None:
        self.spans.append(span)

    def strategy(self, span: Any) -> None:
        self.strategies.append(span)

    def event(self, event: Any) -> None:
        self.events.append(event)

    def progress(self, view: Any) -> None:
        self.views.append(view)
        self.watch(view)

    def endpoint(self, host: str, port: int) -> None:
        self.endpoints.append((host, port))

    def values(self, state: Any) -> None:
        self.states.append(state)

    def finish(self, summary: Any) -> None:
        self.summaries.append(summary)


class CoordinatorKilled(BaseException):
    """The coordinator's process is gone, wherever it was: nothing may catch this."""


class _Mouth:
    """What a coordinator tells; the dead say nothing."""

    def __init__(self, observer: Any) -> None:
        self._observer = observer

    def __getattr__(self, method: str) -> Any:
        if isinstance(sys.exc_info()[1], CoordinatorKilled):
            return lambda *args: None
        return getattr(self._observer, method)


def tiny_config(**changes: Any) -> ClusterConfig:
    """`changes` are sections as dictionaries, merged over a small run."""
    base: dict[str, dict[str, Any]] = {
        "rollout": {
            "num_servers": 2,
            "group_size": 4,
            "prompts_per_step": 6,
            "engine": {"type": "native", "max_running": 12, "max_len": 1024},
        },
        "speculation": {
            "selector": {
                "type": "fixed", "strategy": {"drafter": "eagle", "depth": 3, "topk": 1, "num_draft_tokens": 4},
            }
        },
        "drafter": {"micro_step_budget_s": 0.1, "round_s": 0.5},
        "run": {"steps": 3, "eval_prompts": 5},
        "coordinator": {"lease_s": 5.0, "call_timeout_s": 20.0, "start_timeout_s": 30.0},
    }  # fmt: skip
    for section, values in changes.items():
        base[section] = {**base.get(section, {}), **values}
    return ClusterConfig.model_validate(base)


# In `rollout`: an engine that keeps hidden states. In `placement` it wants mode local, or GPUs.
SGLANG: dict[str, Any] = {"type": "sglang", "max_running": 12, "max_len": 1024}


class World:
    """A whole run on fakes: `coordinator.run()` goes through it; kill services by name."""

    def __init__(self, config: ClusterConfig | None = None, train_prompts: int = 20) -> None:
        self.config = config = config or tiny_config()
        self.clock = FakeClock()
        self.host = host = LocalHost(self.clock, self.clock.sleep)
        slots = range(config.rollout.num_servers)
        capacity = config.rollout.engine.max_running  # type: ignore[union-attr]
        self.servers = [
            LocalService(f"rollout-{i}", lambda i=i: FakeRollout(i, self.clock, capacity), host) for i in slots
        ]
        self.drafters = [LocalService(f"drafter-{i}", lambda i=i: self._new_drafter(i), host) for i in slots]
        self.policy = LocalService("policy", self._new_policy, host)
        self.reward = LocalService("reward", FakeReward, host)
        self.observer = Recorder()
        self.services = Services(
            rollout=[LocalRolloutClient(s) for s in self.servers],
            drafters=[LocalDrafterClient(s) for s in self.drafters],
            policy=LocalPolicyClient(self.policy),
            reward=LocalRewardClient(self.reward),
            waiter=host,
            initial_drafter=Blob({"trained": 0}),
            advantages=partial(advantages, algorithm=config.policy.algorithm),
        )
        self.inputs = Inputs(make_prompts(train_prompts), make_prompts(8, 1000), SAMPLING)
        self.coordinator = Coordinator(config, self.inputs, self.services, self.observer, self.clock)

    def _new_drafter(self, slot: int) -> FakeDrafter:
        drafter = FakeDrafter(slot, self.clock)
        if self.config.placement.lends_memory:
            drafter.before_train = self._away
        return drafter

    def _away(self) -> None:
        policy = self.policy.instance
        assert policy is None or policy.released, "a drafter trains on a GPU whose memory the policy has"

    def _new_policy(self) -> FakePolicy:
        if not self.config.placement.lends_memory:
            return FakePolicy(self.clock)
        return FakePolicy(self.clock, released=True, servers=lambda: [s.instance for s in self.servers])

    def run_with_takeovers(self) -> dict[str, Any]:
        """As the driver does it: a coordinator that dies (CoordinatorKilled) is replaced and the run goes on."""
        memory = RunMemory(self.observer)
        takeover = None
        while True:
            mouth = _Mouth(memory)
            args = self.config, self.inputs, self.services, mouth, self.clock
            self.coordinator = Coordinator(*args, takeover)  # type: ignore[arg-type]
            try:
                return self.coordinator.run()
            except CoordinatorKilled:
                takeover = memory.takeover(self.clock())

    def replace_services(self, **changes: Any) -> None:
        self.services = replace(self.services, **changes)
        self.coordinator = Coordinator(self.config, self.inputs, self.services, self.observer, self.clock)
