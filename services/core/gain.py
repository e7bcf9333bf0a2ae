"""What a rollout phase is expected to gain from drafting: the question and the answer. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """The rollouts of one server in a phase. `lengths`: response tokens, groups of `group_size` one after the other, in
    the order in which they come; `prompt_tokens`: of a mean prompt; `capacity`: rollouts that run at once."""

    lengths: tuple[int, ...]
    group_size: int
    prompt_tokens: float
    capacity: int
    temperature: float

    def __post_init__(self) -> None:
        assert self.lengths and all(n >= 1 for n in self.lengths), "a response has at least one token"
        assert 1 <= self.group_size <= self.capacity, "a group runs as a whole"


@dataclass(frozen=True, slots=True)
class ExpectedGain:
    """Seconds of decoding, prefills apart: with the strategy that is best at each moment, and with OFF throughout."""

    on_s: float
    off_s: float

    @property
    def ratio(self) -> float:
        return self.off_s / self.on_s

    @classmethod
    def summed(cls, parts: Iterable[ExpectedGain]) -> ExpectedGain | None:
        """Of several servers together: seconds of work, as the achieved gain counts them; None for no part."""
        known = list(parts)
        return cls(sum(p.on_s for p in known), sum(p.off_s for p in known)) if known else None
