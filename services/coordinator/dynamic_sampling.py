"""Which groups a step trains on, and which prompts take the place of those without a signal. Pure.

Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): a group whose rewards are all equal has no
gradient, so further prompts are sampled until the batch is full of groups that have one. Deviations: the rounds are
bounded, since a policy that always fails, or never does, would sample for ever; and a batch that is not full then keeps
its size: it is filled up with groups without a signal, which `policy.zero_variance` says what to do with.

Further prompts come from an order of their own, so that a step's own prompts, and all that is drawn for it, follow from
its number, whatever earlier steps dropped: there is no position that a coordinator or a checkpoint could lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from services.config.schema import ClusterConfig
from services.coordinator.work import in_passes, prompts_of_step
from services.core.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class PromptDraws:
    """Draws prompts. `per_step`: how many groups a step trains on; `rounds`: the most of one step."""

    prompts: Sequence[Prompt]
    per_step: int
    seed: int
    rounds: int = 1

    @classmethod
    def configured(cls, config: ClusterConfig, prompts: Sequence[Prompt]) -> PromptDraws:
        sampling = config.policy.algorithm.dynamic_sampling
        rounds = sampling.max_rounds if sampling else 1
        return cls(prompts, config.rollout.prompts_per_step, config.run.seed, rounds)

    def of_step(self, step: int) -> list[Prompt]:
        """A 1-based step's own prompts."""
        return prompts_of_step(self.prompts, step, self.per_step, self.seed)

    def further(self, step: int, round_number: int, count: int, known: Sequence[Prompt]) -> list[Prompt]:
        """At most `count` prompts for round 2, 3 ... of a step, none of them in `known` nor twice; fewer when the set
        has no more."""
        places = ((step - 1) * (self.rounds - 1) + round_number - 2) * self.per_step
        # any two passes in a row hold a whole one
        seen = islice(in_passes(self.prompts, places, f"{self.seed}/further"), 2 * len(self.prompts))
        used, fresh = {prompt.id for prompt in known}, dict[str, Prompt]()
        for prompt in seen:
            if len(fresh) == count:
                break
            if prompt.id not in used:
                fresh[prompt.id] = prompt
        return list(fresh.values())


class StepGroups:
    """The groups of one step, round by round. `step` counts from the first one that took prompts of this set."""

    def __init__(self, draws: PromptDraws, step: int, has_signal: Callable[[Group], bool]) -> None:
        self._draws, self._step, self._has_signal = draws, step, has_signal
        self._signals: list[bool] = []
        self.sampled: list[Group] = []
        self.rounds = 0

    @property
    def num_missing(self) -> int:
        """Groups with a signal that the batch lacks."""
        return max(0, self._draws.per_step - sum(self._signals))

    def add(self, groups: Sequence[Group]) -> list[Prompt]:
        """Take a round's groups in, in group order. Returns the next round's prompts; none when the batch is full, the
        rounds are used up, or there are no further prompts."""
        self.rounds += 1
        self.sampled.extend(groups)
        self._signals.extend(map(self._has_signal, groups))
        if not self.num_missing or self.rounds >= self._draws.rounds:
            return []
        known = [group.prompt for group in self.sampled]
        return self._draws.further(self._step, self.rounds + 1, self._wanted(), known)

    def chosen(self) -> list[Group]:
        """What to train on, in group order: of the groups with a signal the first ones, and others where they lack."""
        places = sorted(range(len(self.sampled)), key=lambda i: not self._signals[i])  # stable
        return [self.sampled[i] for i in sorted(places[: self._draws.per_step])]

    def warning(self) -> str | None:
        """When rounds did not fill the batch."""
        if self._draws.rounds == 1 or not self.num_missing:
            return None
        return (
            f"{self.num_missing} of {self._draws.per_step} groups have no signal after {self.rounds} rounds of dynamic "
            f"sampling, {len(self.sampled)} groups: the prompts are too hard or too easy for the policy"
        )

    def _wanted(self) -> int:
        """So many that, at the share of signals so far, the next round fills the batch; at most a step's worth."""
        share = sum(self._signals) / len(self._signals)
        per_step = self._draws.per_step
        return min(per_step, math.ceil(self.num_missing / share)) if share else per_step
