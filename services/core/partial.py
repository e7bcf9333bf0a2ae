"""A rollout cut in the middle, as a record. Standard library only; part of `services.core.types`, which names it."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.acceptance import AcceptanceStats
from services.core.pickled import pickled_by_call


@pickled_by_call
@dataclass(frozen=True, slots=True)
class PartialRollout:
    """A response that was withdrawn from its server before its end, to be continued by another one: its fields are
    those of the `Rollout` that comes of it. `started_s` is by the first server's clock; nothing generated yet is an
    empty response."""

    group_id: str
    index: int
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    drafter_versions: tuple[int, ...]
    acceptance: AcceptanceStats
    started_s: float

    def __post_init__(self) -> None:
        assert len(self.rollout_logprobs) == len(self.response_ids), "one logprob per emitted token"

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}#{self.index}"
