"""Group-relative advantages (GRPO, Shao et al. 2024). Pure Python: no tensors, no torch.

    advantage_i = (reward_i - mean) / (std + EPS)

per group, with the sample standard deviation (divisor n - 1). One group at a time, on purpose: a floor on the std that
is applied to a whole stack of groups shrinks the advantages of groups whose rewards lie close together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.core.errors import BatchError
from services.core.types import Group

EPS = 1e-6


def advantages(groups: Sequence[Group], *, eps: float = EPS) -> tuple[tuple[float, ...], float]:
    """(one advantage per rollout, groups and rollouts in the order given; fraction of groups without a signal).

    - A reward with `error` set is no verdict: it is left out of its group's mean and std, and its rollout gets 0.
    - A group whose remaining rewards are all equal, or fewer than two, carries no signal: every advantage is 0 and the
      group counts in the fraction. The policy trainer recognises such a group by its zeros (`policy.zero_variance`).
    - A reward that is NaN or infinite without `error` is a verifier's bug, not a signal-free group: BatchError.
    """
    result: list[float] = []
    flat = 0
    for group in groups:
        found = _group_advantages(group, eps)
        flat += found is None
        result.extend(found or [0.0] * len(group.rewards))
    return tuple(result), flat / len(groups) if groups else 0.0


def _group_advantages(group: Group, eps: float) -> list[float] | None:
    """Advantages of one group; None when its rewards do not differ."""
    for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
        if reward.error is None and not math.isfinite(reward.value):
            raise BatchError(
                f"rollout {rollout.rollout_id} has reward {reward.value}: a verifier must return a finite number, "
                "or set Reward.error when it cannot judge"
            )
    valid = [r.value for r in group.rewards if r.error is None]
    if len(valid) < 2 or _all_equal(valid):
        return None
    mean = math.fsum(valid) / len(valid)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in valid) / (len(valid) - 1))
    return [0.0 if r.error is not None else (r.value - mean) / (std + eps) for r in group.rewards]


def _all_equal(values: Sequence[float]) -> bool:
    """Equal up to float64 rounding, so that 0.1 + 0.2 and 0.3 are one reward."""
    return max(values) - min(values) <= 1e-14 * max(1.0, *(abs(v) for v in values))
