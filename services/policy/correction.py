"""Importance weights for the mismatch between rollout and trainer: the engine samples from its own arithmetic, so what
it drew is not quite what the trainer's policy would draw. Pure functions over flat lists of response tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.config.policy import CorrectionConfig
from services.policy.surrogate import masked_difference, over_segments


@dataclass(frozen=True)
class Correction:
    """`weights` [N], no gradient, 1 at masked tokens; `cut` [N]: tokens whose weight was bounded, or that take no
    part."""

    weights: Tensor
    cut: Tensor


def correction(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, segments: Tensor, config: CorrectionConfig
) -> Correction:
    """Weights trainer / engine, both before the update. With level "sequence" or "geometric" a response has one weight,
    so that masking rejects it whole: token by token, a response of mixed tokens would keep the ones that agree."""
    log_weight = masked_difference(trainer_logprobs.detach(), rollout_logprobs, mask)
    if config.level != "token":
        log_weight = over_segments(log_weight, mask, segments, mean=config.level == "geometric")
    weight = torch.where(mask, log_weight.clamp(-20.0, 20.0).exp(), torch.ones_like(log_weight))
    if config.mode == "truncate":
        return Correction(weight.clamp_max(config.high), (weight > config.high) & mask)
    outside = ((weight < config.low) | (weight > config.high)) & mask
    return Correction(torch.where(outside, torch.zeros_like(weight), weight), outside)
