"""One response under way: what every engine keeps of it and checks before it begins, and the native engine's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.core.errors import RequestError
from services.core.types import AcceptanceStats, FinishReason, GroupWork, Rollout, RunningRequest, SamplingParams
from services.speculation.acceptance import AcceptanceCounter


def note_version(versions: list[int], version: int | None) -> None:
    """Add what is served from now on; a version loaded again is not another version."""
    if version is not None and versions[-1:] != [version]:
        versions.append(version)


def check_fits(work: GroupWork, vocab_size: int, max_len: int) -> None:
    """RequestError when an engine of this vocabulary and length can never serve `work`."""
    ids = work.prompt.token_ids
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        raise RequestError(f"{work.group_id}: prompt ids must be a non-empty list of ids in [0, {vocab_size})")
    if len(ids) + work.sampling.max_tokens > max_len:
        raise RequestError(
            f"{work.group_id}: {len(ids)} prompt tokens + max_tokens {work.sampling.max_tokens} exceed "
            f"rollout.engine.max_len {max_len}: shorten the prompt or raise max_len"
        )


@dataclass
class RequestLife:
    """What every engine knows of one response under way, beside its tokens."""

    work: GroupWork
    index: int
    seed: int
    started_s: float
    policy_versions: list[int]
    drafter_versions: list[int]

    @property
    def rollout_id(self) -> str:
        return f"{self.work.group_id}#{self.index}"

    @property
    def sampling(self) -> SamplingParams:
        return self.work.sampling

    def rollout(
        self,
        tokens: tuple[Sequence[int], Sequence[float]],
        text: str,
        reason: FinishReason,
        acceptance: AcceptanceStats,
        now_s: float,
        server: str,
    ) -> Rollout:
        """`tokens`: response ids and their rollout_logprobs."""
        return Rollout(
            group_id=self.work.group_id,
            prompt_id=self.work.prompt.id,
            index=self.index,
            seed=self.seed,
            prompt_ids=self.work.prompt.token_ids,
            response_ids=tuple(tokens[0]),
            rollout_logprobs=tuple(tokens[1]),
            text=text,
            finish_reason=reason,
            sampling=self.sampling,
            policy_versions=tuple(self.policy_versions),
            drafter_versions=tuple(self.drafter_versions),
            acceptance=acceptance,
            server=server,
            started_s=self.started_s,
            finished_s=now_s,
        )


@dataclass
class Request(RequestLife):
    """Mutable state of one response of the native engine; becomes a frozen Rollout when it ends."""

    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    acceptance: AcceptanceCounter = field(default_factory=AcceptanceCounter)

    def last_ids(self, count: int) -> list[int]:
        """The last `count` tokens of prompt + response."""
        found = self.response_ids[-count:]
        short = count - len(found)
        return [*self.work.prompt.token_ids[-short:], *found] if short else found

    def running(self) -> RunningRequest:
        return RunningRequest(self.rollout_id, len(self.response_ids), self.acceptance.stats())

    def finish(self, reason: FinishReason, text: str, now_s: float, server: str) -> Rollout:
        tokens = self.response_ids, self.logprobs
        return self.rollout(tokens, text, reason, self.acceptance.stats(), now_s, server)
