"""One response under way: what every engine keeps of it and checks before it begins, and the native engine's part."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from services.core.errors import RequestError
from services.core.types import (
    AcceptanceStats,
    FinishReason,
    GroupWork,
    PartialRollout,
    Rollout,
    RunningRequest,
    SamplingParams,
    ServedVersions,
)
from services.speculation.acceptance import AcceptanceCounter
from services.speculation.budget import AcceptanceRate

KEEPS_NONE = "this engine keeps no hidden states: set drafter.states: engine"


def note_version(versions: list[int], version: int | None) -> None:
    """Add what is served from now on; a version loaded again is not another version."""
    if version is not None and versions[-1:] != [version]:
        versions.append(version)


def check_keeps(work: GroupWork, capture_bytes: int) -> None:
    """RequestError when `work` wants its hidden states kept and the engine has nothing set aside for them."""
    if work.keep_states and not capture_bytes:
        raise RequestError(f"{work.group_id}: {KEEPS_NONE}")


def check_memory(work: GroupWork, released: bool) -> None:
    """RequestError when the engine's memory is lent out."""
    if released:
        raise RequestError(f"{work.group_id}: this server's memory is released: resume it first")


def check_room(work: GroupWork, max_running: int, released: bool) -> None:
    """RequestError when the memory is lent out, or not all of a group's rollouts can run at once."""
    check_memory(work, released)
    if len(work.indices) > max_running:
        raise RequestError(
            f"{work.group_id}: {len(work.indices)} rollouts exceed rollout.engine.max_running {max_running}"
        )


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
    for partial in work.partials:
        known = partial.response_ids
        if known and (min(known) < 0 or max(known) >= vocab_size):
            raise RequestError(f"{partial.rollout_id}: its ids so far must be in [0, {vocab_size})")
        if len(known) >= work.sampling.max_tokens:
            raise RequestError(
                f"{partial.rollout_id}: {len(known)} tokens of {work.sampling.max_tokens} are there already: it is "
                "finished, nothing is left to continue"
            )


def continued_seed(seed: int, num_tokens: int) -> int:
    """The seed of the rest of a response whose first `num_tokens` tokens another server drew.

    What is drawn after the cut must not depend on the numbers drawn before it. A hash, since the seeds of a group may
    lie next to each other; a response that did not begin yet keeps its own.
    """
    if not num_tokens:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{num_tokens}".encode(), digest_size=6).digest(), "big")


@dataclass(frozen=True)
class Withdrawn:
    """What an engine hands back when rollouts are withdrawn; `finished` ended before they could be."""

    partials: tuple[PartialRollout, ...]
    finished: tuple[Rollout, ...] = ()


def take_out(work: GroupWork, rollout_ids: Collection[str], now_s: float) -> tuple[GroupWork | None, Withdrawn]:
    """Of work that did not begin: what is left of it without `rollout_ids`, and those, as they came."""
    out = [i for i in work.indices if f"{work.group_id}#{i}" in rollout_ids]
    nothing = AcceptanceStats()
    partials = tuple(work.partial(i) or PartialRollout(work.group_id, i, (), (), (), (), nothing, now_s) for i in out)
    left = set(work.indices) - set(out)
    return (work.subset(left) if left else None), Withdrawn(partials)


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

    def serve(self, versions: ServedVersions) -> None:
        """From now on it is generated with these."""
        note_version(self.policy_versions, versions.policy)
        note_version(self.drafter_versions, versions.drafter)

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

    def partial_of(self, tokens: tuple[Sequence[int], Sequence[float]], stats: AcceptanceStats) -> PartialRollout:
        """`tokens` as for `rollout`. A response without tokens was produced with no version."""
        begun = bool(tokens[0])
        return PartialRollout(
            group_id=self.work.group_id,
            index=self.index,
            response_ids=tuple(tokens[0]),
            rollout_logprobs=tuple(tokens[1]),
            policy_versions=tuple(self.policy_versions) if begun else (),
            drafter_versions=tuple(self.drafter_versions) if begun else (),
            acceptance=stats,
            started_s=self.started_s,
        )


@dataclass
class Request(RequestLife):
    """Mutable state of one response of the native engine; becomes a frozen Rollout when it ends."""

    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    acceptance: AcceptanceCounter = field(default_factory=AcceptanceCounter)
    learned: AcceptanceRate = field(default_factory=AcceptanceRate)  # of the EAGLE drafter's tokens
    indexed: int = 0  # response tokens that the suffix index was told of

    @classmethod
    def begin(cls, work: GroupWork, index: int, seed: int, now_s: float) -> Request:
        """A response from its beginning, or from where another server left it."""
        known = work.partial(index)
        if known is None:
            return cls(work, index, seed, now_s, [], [])
        versions = list(known.policy_versions), list(known.drafter_versions)
        counter = AcceptanceCounter(known.acceptance)
        tokens = list(known.response_ids), list(known.rollout_logprobs)
        return cls(work, index, seed, known.started_s, *versions, *tokens, counter)

    def last_ids(self, count: int) -> list[int]:
        """The last `count` tokens of prompt + response."""
        found = self.response_ids[-count:]
        short = count - len(found)
        return [*self.work.prompt.token_ids[-short:], *found] if short else found

    def running(self) -> RunningRequest:
        return RunningRequest(self.rollout_id, len(self.response_ids), self.acceptance.stats())

    def partial(self) -> PartialRollout:
        return self.partial_of((self.response_ids, self.logprobs), self.acceptance.stats())

    def finish(self, reason: FinishReason, text: str, now_s: float, server: str) -> Rollout:
        tokens = self.response_ids, self.logprobs
        return self.rollout(tokens, text, reason, self.acceptance.stats(), now_s, server)
