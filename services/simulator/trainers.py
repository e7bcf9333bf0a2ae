"""The drafter trainers, the policy trainer and the reward workers of a simulation: what they answer, and how long that
takes. A training state is a `Skill`, a policy its version, hidden states the policy version that they are of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.core.types import (
    AcceptanceEstimate,
    DrafterProgress,
    Group,
    HiddenStateChunk,
    PolicyStepReport,
    Prompt,
    Reward,
    Rollout,
    TrainBatch,
)
from services.simulator.learning import Skill
from services.simulator.scenario import Scenario

STATE_BYTES = 16_384  # hidden states of a token: 8,192 numbers in bfloat16
PACKED = 8192  # tokens of a micro-step
NO_FIGURES = (0.0,) * 10  # of a report, between its version and its tokens: nothing is computed


class TrainerModel:
    """The drafter trainer of one slot."""

    def __init__(self, scenario: Scenario) -> None:
        self._learning, self._seconds = scenario.learning, scenario.seconds
        self._state: Skill | None = None
        self._data: int | None = None  # policy version of the newest hidden states
        self._interrupted = -1

    def begin(self, state: Skill, epoch: int, lane: int) -> tuple[int, float]:
        seconds = 0.0 if state == self._state else self._seconds.adopt
        self._state = state
        return state.total_steps, seconds

    def prepare(self, state: Skill) -> tuple[None, float]:
        self._state = state
        return None, self._seconds.adopt

    def add_chunk(self, version: int) -> tuple[None, float]:
        self._data = version
        return None, 0.0

    def micro_steps(self, budget_s: float, epoch: int) -> int:
        """That `train` will make if nothing comes between."""
        if self._data is None or self._interrupted == epoch:
            return 0
        return max(1, math.ceil(budget_s / self._seconds.micro_step))

    def interrupt(self, epoch: int) -> None:
        self._interrupted = epoch

    def train(self, steps: int) -> DrafterProgress:
        assert self._state is not None, "training without a state"
        if steps:
            assert self._data is not None, "training without data"
            self._state = self._learning.trained(self._state, steps, self._data)
        seconds = steps * self._seconds.micro_step
        return DrafterProgress(steps, self._state.total_steps, steps * PACKED, 1 - self._state.skill, (), seconds)

    def snapshot(self) -> tuple[tuple[int, Skill], float]:
        assert self._state is not None
        return (self._state.total_steps, self._state), 0.0

    def held(self) -> tuple[tuple[int, Skill | None], float]:
        return (-1 if self._state is None else self._state.total_steps, self._state), 0.0

    def merge(self, states: Sequence[Skill], steps: Sequence[int]) -> tuple[tuple[int, Skill], float]:
        merged = self._learning.merged(states, steps)
        return (merged.total_steps, merged), self._seconds.merge * len(states)

    def estimate(self, drafters: dict[str, Skill], version: int) -> tuple[list[AcceptanceEstimate], float]:
        found = [
            AcceptanceEstimate(name, (), self._learning.acceptance_length(state, version), PACKED)
            for name, state in drafters.items()
        ]
        return found, self._seconds.estimate


class PolicyModel:
    def __init__(self, scenario: Scenario) -> None:
        self._seconds, self._gpus, self._trained = scenario.seconds, scenario.policy_gpus, scenario.trained
        self.version = self.steps_done = 0

    def train_step(self, batch: TrainBatch) -> tuple[tuple[PolicyStepReport, HiddenStateChunk, int], float]:
        """(report, chunk, what the chunk's blob is)."""
        old = self.version
        assert all(r.policy_versions == (old,) for r in batch.rollouts), "rollouts of another policy"
        tokens = sum(len(r.prompt_ids) + len(r.response_ids) for r in batch.rollouts)
        seconds = (
            self._seconds.policy_step + self._seconds.policy_token * self._trained.get(batch.step, tokens) / self._gpus
        )
        self.version, self.steps_done = old + 1, batch.step
        report = PolicyStepReport(self.version, *NO_FIGURES, tokens, 0.0, (), seconds)
        chunk = HiddenStateChunk(old, batch.step, len(batch.rollouts), tokens, tokens * STATE_BYTES)
        return (report, chunk, old), seconds

    def publish(self) -> tuple[tuple[int, int], float]:
        return (self.version, self.version), self._seconds.publish


def score(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Reward]:
    """Nobody reads the responses: every other one is right."""
    return [Reward(float(r.index % 2), bool(r.index % 2)) for r in rollouts]


def no_advantages(groups: Sequence[Group]) -> tuple[tuple[float, ...], float]:
    return (0.0,) * sum(len(g.rollouts) for g in groups), 0.0
