"""A simulated run: the real coordinator over simulated services, under a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.config.schema import ClusterConfig
from services.coordinator.coordinator import Coordinator
from services.coordinator.services import Inputs, Services
from services.core.protocols import Blob
from services.core.types import (
    EvalResult,
    Group,
    ProgressView,
    Prompt,
    RunEvent,
    SamplingParams,
    SlotSpan,
    StepMetrics,
    StrategySpan,
)
from services.simulator.agenda import Agenda, VirtualWaiter
from services.simulator.clients import SimulatedDrafter, SimulatedPolicy, SimulatedReward, SimulatedRollout
from services.simulator.scenario import Scenario
from services.simulator.server import Prices, ServerModel, ids
from services.simulator.trainers import PolicyModel, TrainerModel, no_advantages

HOUR_S = 3600.0


@dataclass
class Notes:
    """A RunObserver that keeps steps, and counts events by kind."""

    steps: list[StepMetrics] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)

    def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def rollouts(self, step: int, groups: Sequence[Group]) -> None: ...

    def evaluation(self, result: EvalResult) -> None: ...

    def span(self, span: SlotSpan) -> None: ...

    def strategy(self, span: StrategySpan) -> None: ...

    def event(self, event: RunEvent) -> None:
        self.events[event.kind] = self.events.get(event.kind, 0) + 1

    def progress(self, view: ProgressView) -> None: ...

    def endpoint(self, host: str, port: int) -> None: ...

    def values(self, state: Mapping[str, Sequence[float]]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Simulated:
    """`virtual_s`: of the whole run; `coordinator_s`: of the stopwatch, what the coordinator's own code took in it;
    `questions` and `answers`: messages that it sent and got; `turns`: times that it looked."""

    slots: int
    steps: tuple[StepMetrics, ...]
    events: Mapping[str, int]
    virtual_s: float
    coordinator_s: float
    model_s: float
    questions: int
    answers: int
    turns: int


def simulate(config: ClusterConfig, scenario: Scenario, stopwatch: Callable[[], float]) -> Simulated:
    """One run of `config` to its end. `stopwatch` tells what computing costs here; it decides nothing."""
    agenda = Agenda()
    waiter = VirtualWaiter(agenda, scenario.seconds.turn, stopwatch)
    notes, services = Notes(), build_services(config, scenario, waiter)
    fail_now_and_then(services, scenario, agenda)
    coordinator = Coordinator(config, build_inputs(config, scenario), services, notes, agenda)
    began = stopwatch()
    coordinator.run()
    real_s = stopwatch() - began
    return Simulated(
        len(services.rollout),
        tuple(notes.steps),
        notes.events,
        agenda.now,
        real_s - waiter.model_s,
        waiter.model_s,
        waiter.questions,
        waiter.answers,
        waiter.turns,
    )


def build_services(config: ClusterConfig, scenario: Scenario, waiter: VirtualWaiter) -> Services:
    seconds, first = scenario.seconds, scenario.learning.first()
    prices = Prices(scenario.costs)
    slots, message_s = range(config.rollout.num_servers), scenario.seconds.message
    learned = config.speculation.learned

    def server(slot: int) -> SimulatedRollout:
        return SimulatedRollout(
            f"rollout-{slot}", waiter, message_s, lambda: ServerModel(config, scenario, prices, slot)
        )

    def trainer(slot: int) -> SimulatedDrafter:
        build = lambda: TrainerModel(scenario)  # noqa: E731
        return SimulatedDrafter(f"drafter-{slot}", waiter, message_s, seconds.micro_step, first, build)

    return Services(
        rollout=[server(slot) for slot in slots],
        drafters=[trainer(slot) for slot in slots] if learned else [],
        policy=SimulatedPolicy(waiter, message_s, PolicyModel(scenario)),
        reward=SimulatedReward(waiter, message_s, seconds.reward),
        waiter=waiter,
        initial_drafter=Blob(first) if learned else None,
        advantages=no_advantages,
    )


def build_inputs(config: ClusterConfig, scenario: Scenario) -> Inputs:
    """Prompts that nobody reads: a pass over them is as long as the run."""
    count = config.run.steps * config.rollout.prompts_per_step
    names = list(scenario.prompts) or [f"prompt-{i}" for i in range(count)]
    prompts = tuple(Prompt(n, "", ids(scenario.prompts.get(n, scenario.prompt_tokens)), "", "simulated") for n in names)
    sampling = config.rollout.sampling
    return Inputs(prompts, (), SamplingParams(sampling.temperature, max_tokens=sampling.max_tokens))


def fail_now_and_then(services: Services, scenario: Scenario, agenda: Agenda) -> None:
    """Each slot dies after an exponentially distributed time, and comes back."""
    if not scenario.failures:
        return
    rng = random.Random(f"{scenario.seed}/failures")
    for slot in range(len(services.rollout)):
        _fail_later([services.rollout[slot], *services.drafters[slot : slot + 1]], scenario, agenda, rng)


def _fail_later(processes: list[Any], scenario: Scenario, agenda: Agenda, rng: random.Random) -> None:
    def die() -> None:
        for process in processes:
            process.kill()
        agenda.at(agenda.now + scenario.seconds.restart, come_back)

    def come_back() -> None:
        for process in processes:
            process.restart()
        later()

    def later() -> None:
        agenda.at(agenda.now + rng.expovariate(scenario.failures) * HOUR_S, die)

    later()
