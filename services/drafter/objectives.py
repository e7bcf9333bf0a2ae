"""What drafter training minimises, entry by entry: pure functions of two log-distributions.

Rejection sampling accepts a draft with probability alpha = sum_v min(target_probs, draft_probs) (Leviathan et
al. 2023).
Cross-entropy bounds alpha from below (by Pinsker's inequality) but spends capacity where tokens are accepted anyway;
the other two look at alpha itself, at the run's temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Objective = Callable[[Tensor, Tensor], Tensor]
CROSS_ENTROPY = "cross_entropy"


def cross_entropy(target_logprobs: Tensor, draft_logprobs: Tensor) -> Tensor:
    """[n,V], [n,V] -> [n]: -sum_v target_probs log draft_probs."""
    return -(target_logprobs.exp() * draft_logprobs).sum(-1)


def total_variation(target_logprobs: Tensor, draft_logprobs: Tensor) -> Tensor:
    """[n,V], [n,V] -> [n]: 1 - alpha. Its gradient vanishes where the draft has no mass on the target's tokens yet."""
    return 1 - torch.minimum(target_logprobs, draft_logprobs).exp().sum(-1)


def acceptance_likelihood(target_logprobs: Tensor, draft_logprobs: Tensor) -> Tensor:
    """[n,V], [n,V] -> [n]: -log alpha. The gradient is total variation's over alpha, so it does not vanish; summed in
    logarithms, an alpha too small for a float needs no clamp."""
    return -torch.minimum(target_logprobs, draft_logprobs).logsumexp(-1)


OBJECTIVES: Mapping[str, Objective] = {
    CROSS_ENTROPY: cross_entropy,
    "total_variation": total_variation,
    "acceptance_likelihood": acceptance_likelihood,
}


def compared_at(name: str, temperature: float) -> float:
    """The temperature at which an objective compares: cross-entropy at 1, where the target's distribution says most;
    those about acceptance at the run's."""
    return 1.0 if name == CROSS_ENTROPY else temperature


def target_logprobs(logits: Tensor, temperature: float) -> Tensor:
    """[n,V]. Temperature 0: all mass on the argmax token."""
    if temperature:
        return (logits / temperature).log_softmax(-1)
    return torch.full_like(logits, -torch.inf).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)


def draft_logprobs(logits: Tensor, temperature: float) -> Tensor:
    """[n,V]. At temperature 0 as at 1: an argmax has no gradient, and raising the probability of the target's token is
    what moves it."""
    return (logits / (temperature or 1.0)).log_softmax(-1)
