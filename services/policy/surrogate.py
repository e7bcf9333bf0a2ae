"""Per-token loss terms of each algorithm, as pure functions over flat lists of response tokens.

All tensors are [N], tokens of a response next to each other, `segments` the response of each. `anchor_logprobs` are
frozen: the ratio exp(policy_logprobs - anchor_logprobs) leaves 1 with the second update. The mask acts before exp: a
masked token's log-probabilities may be anything, infinities included (0 * inf is NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.config.policy import Algorithm, Cispo, Gspo, Rloo

# exp(20) still fits float32 with room for products; beyond it the ratio is clipped anyway and gives no gradient.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class TokenTerms:
    """`loss` and `kl` have gradients; `ratio` is 1 and the others are 0 where a token is masked out."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor


def token_terms(
    algorithm: Algorithm,
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
) -> TokenTerms:
    if isinstance(algorithm, Rloo):
        return reinforce(policy_logprobs, advantages, mask)
    log_ratio = masked_difference(policy_logprobs, anchor_logprobs, mask)
    bounds = algorithm.clip_low, algorithm.clip_high
    if isinstance(algorithm, Cispo):
        return clipped_weight(policy_logprobs, log_ratio, advantages, mask, *bounds)
    if isinstance(algorithm, Gspo):
        log_ratio = over_segments(log_ratio, mask, segments, mean=True)
    return clipped_surrogate(log_ratio, advantages, mask, *bounds)


def masked_difference(policy_logprobs: Tensor, anchor_logprobs: Tensor, mask: Tensor) -> Tensor:
    """policy - old, 0 at masked tokens, and bounded by MAX_LOG_RATIO."""
    zero = torch.zeros_like(policy_logprobs)
    difference = torch.where(mask, policy_logprobs - torch.where(mask, anchor_logprobs, zero), zero)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def over_segments(values: Tensor, mask: Tensor, segments: Tensor, mean: bool) -> Tensor:
    """[N] -> [N]: each token's value becomes the sum or the mean over the unmasked tokens of its response."""
    count = int(segments[-1]) + 1 if len(segments) else 0
    total = values.new_zeros(count).index_add(0, segments, torch.where(mask, values, torch.zeros_like(values)))
    if mean:
        tokens = values.new_zeros(count).index_add(0, segments, mask.to(values.dtype))
        total = total / tokens.clamp_min(1)
    return total[segments]


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> TokenTerms:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) (PPO, Schulman et al. 2017; DAPO's two bounds).
    With a response's mean log-ratio at each of its tokens it is GSPO's equation 5."""
    ratio, zero = log_ratio.exp(), torch.zeros_like(log_ratio)
    gain = torch.where(mask, advantages, zero)
    free, bounded = ratio * gain, ratio.clamp(1 - clip_low, 1 + clip_high) * gain
    return TokenTerms(-torch.minimum(free, bounded), ratio.detach(), (bounded < free).detach(), zero)


def clipped_weight(
    policy_logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> TokenTerms:
    """-sg(clip(ratio)) * A * log policy (CISPO): no token loses its gradient, only its weight is bounded."""
    ratio, zero = log_ratio.detach().exp(), torch.zeros_like(log_ratio)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.where(mask, advantages, zero)
    return TokenTerms(-weight * gain * torch.where(mask, policy_logprobs, zero), ratio, (weight != ratio) & mask, zero)


def reinforce(policy_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenTerms:
    """-A * log policy (Williams 1992): on-policy, one update per batch."""
    zero = torch.zeros_like(policy_logprobs)
    loss = -torch.where(mask, advantages, zero) * torch.where(mask, policy_logprobs, zero)
    return TokenTerms(loss, torch.ones_like(zero), torch.zeros_like(mask), zero)
