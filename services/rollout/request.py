"""One running request of the native engine, and how every engine notes the versions a request lived through."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.core.types import AcceptanceStats, FinishReason, GroupWork, Rollout, RunningRequest, SamplingParams
from services.speculation.acceptance import AcceptanceCounter


def note_version(versions: list[int], version: int | None) -> None:
    """Add what is served from now on; a version loaded again is not another version."""
    if version is not None and versions[-1:] != [version]:
        versions.append(version)


@dataclass
class Request:
    """Mutable state of one response under way; becomes a frozen Rollout when it ends."""

    work: GroupWork
    index: int
    seed: int
    started_s: float
    policy_versions: list[int]
    drafter_versions: list[int]
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    acceptance: AcceptanceCounter = field(default_factory=AcceptanceCounter)

    @property
    def rollout_id(self) -> str:
        return f"{self.work.group_id}#{self.index}"

    @property
    def sampling(self) -> SamplingParams:
        return self.work.sampling

    def last_ids(self, count: int) -> list[int]:
        """The last `count` tokens of prompt + response."""
        found = self.response_ids[-count:]
        short = count - len(found)
        return [*self.work.prompt.token_ids[-short:], *found] if short else found

    def running(self) -> RunningRequest:
        return RunningRequest(self.rollout_id, len(self.response_ids), self.acceptance.stats())

    def finish(self, reason: FinishReason, text: str, now_s: float, server: str) -> Rollout:
        stats: AcceptanceStats = self.acceptance.stats()
        return Rollout(
            group_id=self.work.group_id,
            prompt_id=self.work.prompt.id,
            index=self.index,
            seed=self.seed,
            prompt_ids=self.work.prompt.token_ids,
            response_ids=tuple(self.response_ids),
            rollout_logprobs=tuple(self.logprobs),
            text=text,
            finish_reason=reason,
            sampling=self.sampling,
            policy_versions=tuple(self.policy_versions),
            drafter_versions=tuple(self.drafter_versions),
            acceptance=stats,
            server=server,
            started_s=self.started_s,
            finished_s=now_s,
        )
