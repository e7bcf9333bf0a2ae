"""How the drafter's acceptance follows from its training and from the policy's: a model of three numbers.

A drafter has a *skill*: 0 knows nothing, 1 is as good as its size allows. Every policy version moves the target and
takes `drift` of it; every `half_steps` micro-steps halve what is missing. Acceptance of the first position lies between
`floor` and `ceiling` by skill and falls by `fall` from position to position (fig. 16 of the TLT paper, arXiv
2511.16665: 0.96 to 0.7 over eight positions; ours geometric). n slots that train side by side and are averaged count as
n^`parallel` of them (local SGD's speed-up is below n; the exponent is assumed, nobody measured it at such sizes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.simulator.law import Law
from services.speculation.expectation import committed

POSITIONS = 16


@dataclass(frozen=True, slots=True)
class Skill:
    """A training state: `skill` on the policy version that it learned from last."""

    skill: float
    policy_version: int
    total_steps: int


@dataclass(frozen=True, slots=True)
class Learning:
    floor: float = 0.4
    ceiling: float = 0.85
    start: float = 0.6
    drift: float = 0.02
    half_steps: float = 400.0
    fall: float = 0.97
    parallel: float = 0.5
    suffix: tuple[float, float] = (0.2, 0.65)  # of the first position, of those behind it

    def first(self) -> Skill:
        return Skill(self.start, 0, 0)

    def skill_at(self, state: Skill, policy_version: int) -> float:
        """What drift has left of it."""
        return float(state.skill * (1 - self.drift) ** max(0, policy_version - state.policy_version))

    def trained(self, state: Skill, steps: int, policy_version: int) -> Skill:
        """After `steps` on hidden states of `policy_version`."""
        missing = 1 - self.skill_at(state, policy_version)
        skill = 1 - missing * 0.5 ** (steps / self.half_steps)
        return Skill(skill, max(state.policy_version, policy_version), state.total_steps + steps)

    def merged(self, states: Sequence[Skill], steps: Sequence[int]) -> Skill:
        """Of states that began from one, weighted by their micro-steps since."""
        assert states and len(states) == len(steps) and all(n > 0 for n in steps)
        total = sum(steps)
        logs = sum(n * math.log2(max(1e-12, 1 - s.skill)) for s, n in zip(states, steps, strict=True)) / total
        more = total / len(steps) * (len(steps) ** self.parallel - 1)
        version = max(s.policy_version for s in states)
        return Skill(1 - 2 ** (logs - more / self.half_steps), version, states[0].total_steps - steps[0] + total)

    def acceptance(self, state: Skill, policy_version: int) -> tuple[float, ...]:
        """By position, given those before."""
        first = self.floor + (self.ceiling - self.floor) * self.skill_at(state, policy_version)
        return tuple(first * self.fall**k for k in range(POSITIONS))

    def law(self, state: Skill | None, policy_version: int, version: int) -> Law:
        eagle = (0.0,) * POSITIONS if state is None else self.acceptance(state, policy_version)
        return Law(eagle, (self.suffix[0], *(self.suffix[1],) * (POSITIONS - 1)), version)

    def acceptance_length(self, state: Skill, policy_version: int, depth: int = 3) -> float:
        """Of a chain."""
        return committed(list(self.acceptance(state, policy_version)[:depth]))


@dataclass(frozen=True, slots=True)
class GivenAcceptance(Learning):
    """Acceptance as it was measured, whatever is trained: for predicting a run that has been."""

    chain: tuple[float, ...] = ()

    def acceptance(self, state: Skill, policy_version: int) -> tuple[float, ...]:
        return (self.chain + self.chain[-1:] * POSITIONS)[:POSITIONS]
