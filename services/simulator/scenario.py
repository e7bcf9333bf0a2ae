"""What a simulation assumes beside the run's own configuration."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from services.simulator.learning import Learning
from services.speculation.cost_table import CostTable


class Lengths(Protocol):
    def __call__(self, group_id: str, prompt_id: str, index: int, seed: int) -> int:
        """Response tokens of a rollout: the same whoever generates it."""


@lru_cache(maxsize=65_536)
def _common(seed: int, prompt_id: str) -> float:
    return random.Random(f"{seed}/{prompt_id}").gauss(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """`sigma`: of the logarithm; `shared`: the part of its variance that the rollouts of one prompt have in common,
    because a hard problem is hard for all of them."""

    median: float
    sigma: float
    longest: int
    shared: float = 0.5
    seed: int = 0

    def __call__(self, group_id: str, prompt_id: str, index: int, seed: int) -> int:
        own = random.Random(seed).gauss(0.0, math.sqrt(1 - self.shared))
        common = _common(self.seed, prompt_id) * math.sqrt(self.shared)
        return min(self.longest, max(1, round(self.median * math.exp(self.sigma * (own + common)))))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths of a run's rollouts by group and index."""

    known: Mapping[tuple[str, int], int]

    def __call__(self, group_id: str, prompt_id: str, index: int, seed: int) -> int:
        return self.known[group_id, index]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of everything but rounds. `policy_token`: of the policy trainer per token of the batch, `policy_step` beside
    them; `publish` and `load`: of a policy, `load_drafter` of a drafter; `adopt`: a drafter's training state at a
    trainer; `merge`: per state that is averaged; `message`: one way; `turn`: how long the coordinator is busy with what
    it has, while new answers wait; `restart`: until a lost slot answers again."""

    policy_token: float = 2e-5
    policy_step: float = 0.5
    publish: float = 0.5
    load: float = 1.0
    load_drafter: float = 0.2
    adopt: float = 0.1
    micro_step: float = 0.5
    merge: float = 0.05
    estimate: float = 0.5
    reward: float = 0.05
    message: float = 5e-4
    turn: float = 5e-3
    restart: float = 60.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """`costs`: of rounds. `policy_gpus`: the batch's tokens are trained on by so many side by side. `failures`: of a
    slot (its server and its trainer) per hour. `stretch`: a selector's choice stands for at most so many rounds; 1: it
    is asked before each, as in an engine. `noise`: relative deviation of what rounds are told to have taken. `dense`:
    keys and values of what runs are one block as wide as its longest request, which each pass reads whole, and the
    rollouts of a group come in together, as in the native engine; otherwise each request is read for itself and comes
    in alone, as with paged attention. `trained`: tokens that the policy learns from, by step, where they are known;
    else all of the batch."""

    costs: CostTable
    lengths: Lengths
    learning: Learning = field(default_factory=Learning)
    seconds: Seconds = field(default_factory=Seconds)
    prompt_tokens: int = 200
    prefill_rate: float = 20_000.0  # tokens per second of a server
    policy_gpus: int = 1
    failures: float = 0.0
    stretch: int = 1
    noise: float = 0.04
    dense: bool = False
    seed: int = 0
    prompts: Mapping[str, int] = field(default_factory=dict)  # their tokens by id, where they are known
    trained: Mapping[int, float] = field(default_factory=dict)
