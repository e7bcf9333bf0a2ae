"""What the policy trainer accepts: token ids exactly as sampled, with one logprob each under the known convention.

Ids that cannot be what the engine sampled are refused outright (training on re-tokenised text moves every logprob to
a wrong token); a rollout that is merely unusable (NaN logprob, aborted) is dropped and counted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from services.config.policy import PolicyConfig
from services.core.errors import BatchError
from services.core.types import FinishReason, Rollout, TrainBatch

CONVENTION = "processed"


@dataclass(frozen=True)
class AdmittedBatch:
    """Rollouts to run forward; `trained[i]` says whether rollout i takes part in the loss."""

    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...]
    trained: tuple[bool, ...]
    zero_variance_fraction: float
    warnings: tuple[str, ...]


def admit(batch: TrainBatch, vocab_size: int, config: PolicyConfig) -> AdmittedBatch:
    """Check and sort out a batch. Raises BatchError for rollouts that break token-in/token-out, or NaN advantages.

    `zero_variance` "skip" keeps groups without a signal out of the loss, its denominator and the KL term; "keep"
    leaves them in all three. `truncated` "mask" does the same with responses that max_tokens cut off. Truncation and
    abort are read from `finish_reason`, never from the last token id.
    """
    dropped = Counter[str]()
    kept: list[tuple[Rollout, float]] = []
    for rollout, advantage in zip(batch.rollouts, batch.advantages, strict=True):
        reason = _unusable(rollout)
        if rollout.finish_reason is not FinishReason.ABORT:
            _check(rollout, advantage, vocab_size)
        if reason is None:
            kept.append((rollout, advantage))
        else:
            dropped[reason] += 1
    flat = _flat_groups(batch)
    skip = flat if config.zero_variance == "skip" else set()
    groups = {r.group_id for r in batch.rollouts}
    cut = [config.truncated == "mask" and r.finish_reason is FinishReason.LENGTH for r, _ in kept]
    warnings = [f"dropped {n} of {len(batch.rollouts)} rollouts: {why}" for why, n in sorted(dropped.items())]
    if kept and all(cut):
        warnings.append(
            "every response was cut off by max_tokens (policy.truncated: mask): raise it, or shorten prompts"
        )
    return AdmittedBatch(
        rollouts=tuple(r for r, _ in kept),
        advantages=tuple(a for _, a in kept),
        trained=tuple(r.group_id not in skip and not c for (r, _), c in zip(kept, cut, strict=True)),
        zero_variance_fraction=len(flat) / len(groups) if groups else 0.0,
        warnings=tuple(warnings),
    )


def split_updates(work: AdmittedBatch, updates: int) -> list[list[int]]:
    """The trained rollouts in at most `updates` parts of whole groups, about equal in tokens, in their order: a group
    that was cut would be half an advantage."""
    groups: dict[str, list[int]] = {}
    for i, rollout in enumerate(work.rollouts):
        if work.trained[i]:
            groups.setdefault(rollout.group_id, []).append(i)
    total = sum(len(work.rollouts[i].response_ids) for members in groups.values() for i in members)
    parts: list[list[int]] = [[] for _ in range(updates)]
    before = 0
    for members in groups.values():
        own = sum(len(work.rollouts[i].response_ids) for i in members)
        parts[min(updates - 1, int(updates * (before + own / 2) / total))] += members
        before += own
    return [part for part in parts if part]


def _flat_groups(batch: TrainBatch) -> set[str]:
    """Groups whose advantages are all zero: equal rewards, see `services.policy.advantage`."""
    by_group: defaultdict[str, list[float]] = defaultdict(list)
    for rollout, advantage in zip(batch.rollouts, batch.advantages, strict=True):
        by_group[rollout.group_id].append(advantage)
    return {group for group, values in by_group.items() if not any(values)}


def _check(rollout: Rollout, advantage: float, vocab_size: int) -> None:
    name = f"rollout {rollout.rollout_id}"
    if not rollout.prompt_ids or not rollout.response_ids:
        raise BatchError(f"{name} has no prompt or response token ids: the engine must return ids, text is not enough")
    if len(rollout.rollout_logprobs) != len(rollout.response_ids):
        raise BatchError(
            f"{name} has {len(rollout.response_ids)} response ids but {len(rollout.rollout_logprobs)} logprobs: "
            "the engine must return one logprob per sampled id, never ids made again from text"
        )
    ids = (*rollout.prompt_ids, *rollout.response_ids)
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise BatchError(
            f"{name} has token ids outside 0..{vocab_size - 1}: tokenizer and policy do not belong together"
        )
    if rollout.logprob_convention != CONVENTION:
        raise BatchError(
            f"{name} has logprobs of convention {rollout.logprob_convention!r}: the trainer scores under "
            f"{CONVENTION!r} (temperature, top-k, top-p, min-p applied); make the engine report that"
        )
    if not math.isfinite(advantage):
        raise BatchError(f"{name} has advantage {advantage}: look for a NaN reward")


def _unusable(rollout: Rollout) -> str | None:
    if rollout.finish_reason is FinishReason.ABORT:
        return "aborted before their end"
    if not all(math.isfinite(p) for p in rollout.rollout_logprobs):
        return "rollout_logprobs not finite"
    return None
