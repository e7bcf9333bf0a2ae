"""From per-token terms to the loss of a batch.

Aggregation is a weight per token, computed from the lengths of the whole batch before anything runs. The loss of the
batch is then a plain sum over tokens, so its gradient cannot depend on how the batch is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.policy.surrogate import TokenTerms, masked_difference


def token_weights(lengths: Sequence[int], aggregation: str, constant: float) -> tuple[float, ...]:
    """Weight of each token of each rollout, from the number of trained tokens per rollout (0: takes no part).

    "token": 1 / all tokens, every token alike (DAPO). "sequence": the mean of per-rollout means (GRPO), where a long
    wrong answer is punished less per token than a short one. "constant": mean over rollouts of token sums / `constant`
    (Dr. GRPO, Liu et al. 2025), where the length never enters.
    """
    count, total = sum(n > 0 for n in lengths), sum(lengths)
    if aggregation == "token":
        return tuple(1 / total if n else 0.0 for n in lengths)
    if aggregation == "sequence":
        return tuple(1 / (n * count) if n else 0.0 for n in lengths)
    if aggregation == "constant":
        return tuple(1 / (constant * count) if n else 0.0 for n in lengths)
    raise ValueError(f"unknown aggregation {aggregation!r}")


def kl_to_reference(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Schulman's estimates of KL(policy || reference) per token, with d = policy - ref: k1 = d (no bias, may be
    negative, and a gradient that is zero in the mean), k2 = d^2 / 2 (biased, the right gradient), k3 = exp(-d) + d - 1
    (no bias, never negative)."""
    d = masked_difference(policy_logprobs, ref_logprobs, mask)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    if estimator == "k3":
        return (-d).exp() + d - 1
    raise ValueError(f"unknown KL estimator {estimator!r}")


def policy_loss(terms: TokenTerms, weights: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Sum over tokens of weight * (surrogate + kl_coef * kl); 0 with a gradient of 0 when every token is masked."""
    return torch.where(mask, weights * (terms.loss + kl_coef * terms.kl), torch.zeros_like(terms.loss)).sum()
