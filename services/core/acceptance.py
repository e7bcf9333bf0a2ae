"""Speculation accounting as a record. Standard library only; part of `services.core.types`, which names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from operator import mul

from services.core.pickled import pickled_by_call


@pickled_by_call
@dataclass(frozen=True, slots=True)
class AcceptanceStats:
    """Speculation accounting of one rollout (or a sum of several). `histogram[k]` counts verify steps that accepted k
    draft tokens (bonus excluded); `proposed` counts draft tokens offered; `steps_by_strategy` counts verify steps per
    strategy name, OFF decode steps under "off"; `accepted_by_strategy` the accepted draft tokens."""

    histogram: tuple[int, ...] = ()
    proposed: int = 0
    steps_by_strategy: Mapping[str, int] = field(default_factory=dict)
    accepted_by_strategy: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def merged(cls, parts: Iterable[AcceptanceStats]) -> AcceptanceStats:
        """The sum of several requests' accounting."""
        histogram, steps, accepted, proposed = list[int](), dict[str, int](), dict[str, int](), 0
        for part in parts:
            histogram.extend([0] * (len(part.histogram) - len(histogram)))
            for k, number in enumerate(part.histogram):
                histogram[k] += number
            _add(steps, part.steps_by_strategy)
            _add(accepted, part.accepted_by_strategy)
            proposed += part.proposed
        while histogram and not histogram[-1]:
            histogram.pop()
        return cls(tuple(histogram), proposed, steps, accepted)

    @property
    def verify_steps(self) -> int:
        return sum(self.histogram)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(map(mul, self.histogram, count()))

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens committed per verify step, bonus included; None without a verify step."""
        return 1 + self.num_accepted_tokens / self.verify_steps if self.verify_steps else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over proposed draft tokens, in [0, 1]; None when nothing was proposed."""
        return self.num_accepted_tokens / self.proposed if self.proposed else None


def _add(sums: dict[str, int], part: Mapping[str, int]) -> None:
    for name, number in part.items():
        sums[name] = sums.get(name, 0) + number
