"""Group-relative advantages, by the algorithm's baseline. Pure Python: no tensors, no torch.

    standardised    (reward_i - mean) / (std + EPS), std with the divisor n - 1    GRPO (Shao et al. 2024)
    mean            reward_i - mean                                                Dr. GRPO (Liu et al. 2025)
    leave_one_out   reward_i - mean of the others                                  RLOO (Kool et al. 2019)

One group at a time, on purpose: a floor on the std that is applied to a whole stack of groups shrinks the advantages of
groups whose rewards lie close together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.config.policy import Algorithm, Baseline, OverlongConfig
from services.core.errors import BatchError
from services.core.types import Group, Rollout

EPS = 1e-6


def advantages(groups: Sequence[Group], algorithm: Algorithm) -> tuple[tuple[float, ...], float]:
    """(one advantage per rollout, groups and rollouts in the order given; fraction of groups without a signal).

    - A reward with `error` set is no verdict: it is left out of its group's mean and std, and its rollout gets 0.
    - A group whose remaining rewards are all equal, or fewer than two, carries no signal: every advantage is 0 and the
      group counts in the fraction. The policy trainer recognises such a group by its zeros (`policy.zero_variance`).
    - A reward that is NaN or infinite without `error` is a verifier's bug, not a signal-free group: BatchError.
    - `algorithm.overlong` is taken off the rewards first; the rewards that are recorded stay what the verifier said.
    """
    result: list[float] = []
    flat = 0
    for group in groups:
        found = _group_advantages(group, algorithm)
        flat += found is None
        result.extend(found or [0.0] * len(group.rewards))
    return tuple(result), flat / len(groups) if groups else 0.0


def overlong_penalty(rollout: Rollout, overlong: OverlongConfig) -> float:
    """DAPO's equation 13: 0 up to `buffer_tokens` before the budget, then linear, `penalty` at the budget."""
    over = len(rollout.response_ids) - (rollout.sampling.max_tokens - overlong.buffer_tokens)
    return overlong.penalty * min(1.0, max(0.0, over / overlong.buffer_tokens))


def _group_advantages(group: Group, algorithm: Algorithm) -> list[float] | None:
    """Advantages of one group; None when its rewards do not differ."""
    for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
        if reward.error is None and not math.isfinite(reward.value):
            raise BatchError(
                f"rollout {rollout.rollout_id} has reward {reward.value}: a verifier must return a finite number, "
                "or set Reward.error when it cannot judge"
            )
    shaped = [
        _shaped(r.value, rollout, algorithm.overlong) for rollout, r in zip(group.rollouts, group.rewards, strict=True)
    ]
    valid = [value for value, r in zip(shaped, group.rewards, strict=True) if r.error is None]
    if len(valid) < 2 or _all_equal(valid):
        return None
    centre, scale = math.fsum(valid) / len(valid), _scale(valid, algorithm.baseline)
    return [
        0.0 if r.error is not None else (value - centre) * scale for value, r in zip(shaped, group.rewards, strict=True)
    ]


def _shaped(value: float, rollout: Rollout, overlong: OverlongConfig | None) -> float:
    return value if overlong is None else value - overlong_penalty(rollout, overlong)


def _scale(values: Sequence[float], baseline: Baseline) -> float:
    """What the distance from the mean is multiplied by. The mean of the others is n / (n - 1) times as far away."""
    n = len(values)
    if baseline == "mean":
        return 1.0
    if baseline == "leave_one_out":
        return n / (n - 1)
    mean = math.fsum(values) / n
    return 1 / (math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)) + EPS)


def _all_equal(values: Sequence[float]) -> bool:
    """Equal up to float64 rounding, so that 0.1 + 0.2 and 0.3 are one reward."""
    return max(values) - min(values) <= 1e-14 * max(1.0, *(abs(v) for v in values))
