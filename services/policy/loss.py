"""The clipped policy-gradient loss, as pure functions over flat lists of response tokens.

Aggregation is a weight per token, computed from the lengths of the whole batch before anything runs. The loss of the
batch is then a plain sum over tokens, so its gradient cannot depend on how the batch is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) still fits float32 with room for products; beyond it the ratio is clipped anyway and gives no gradient.
MAX_LOG_RATIO = 20.0


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


@dataclass(frozen=True)
class TokenTerms:
    """Flat token tensors of equal length [N]; `ratio` is 1 and the others 0 where a token is masked out."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor


def clipped_surrogate(
    policy_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenTerms:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) per token (PPO, with DAPO's two bounds).

    All [N]; `rollout_logprobs` are the engine's, frozen at sampling, so the ratio leaves 1 with the second inner epoch.
    The mask is applied before exp: a masked token's logprobs may be anything, infinities included.
    """
    zero = torch.zeros_like(policy_logprobs)
    log_ratio = torch.where(mask, policy_logprobs - torch.where(mask, rollout_logprobs, zero), zero)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    gain = torch.where(mask, advantages, zero)
    free, bounded = ratio * gain, ratio.clamp(1 - clip_low, 1 + clip_high) * gain
    return TokenTerms(
        loss=-torch.minimum(free, bounded), ratio=ratio.detach(), clipped=(bounded < free).detach(), kl=zero
    )


def kl_to_reference(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy || reference) per token: exp(d) - d - 1 with d = ref - policy, never < 0."""
    zero = torch.zeros_like(policy_logprobs)
    d = torch.where(mask, torch.where(mask, ref_logprobs, zero) - policy_logprobs, zero)
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d.exp() - d - 1


def policy_loss(terms: TokenTerms, weights: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Sum over tokens of weight * (surrogate + kl_coef * kl); 0 with a gradient of 0 when every token is masked."""
    return torch.where(mask, weights * (terms.loss + kl_coef * terms.kl), torch.zeros_like(terms.loss)).sum()
