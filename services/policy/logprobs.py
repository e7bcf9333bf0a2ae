"""policy_logprobs: the trainer's log-probabilities of the tokens the engine sampled, under the same convention.

The engine reports logprobs of the *processed* distribution, so the trainer processes its logits with the very same
function. Without that, temperature 0.7 or top-p 0.9 alone would move the ratio away from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.models.capture import target_states
from services.models.norms import use_fused_norms
from services.models.packed import use_packed_attention
from services.models.sampling import process_logits
from services.policy.packs import Pack


class Scores(NamedTuple):
    """logprobs [N] under the processed distribution (-inf: the trainer's top-k/top-p/min-p leaves the token out);
    full_logprobs [N] with the temperature only, finite everywhere, for KL; entropy [N] in nats and
    spread [N], the variance of -log p of a token drawn from it, in nats squared, both without gradient;
    hidden [R,W,H], the last hidden state after the final norm, and aux [R,W,A*H], the outputs of the asked-for layers
    without gradient (None when none are), from the same forward pass."""

    logprobs: Tensor
    full_logprobs: Tensor
    entropy: Tensor
    spread: Tensor
    hidden: Tensor
    aux: Tensor | None


class Scorer(nn.Module):
    """The policy, with packed attention and fused norms, as a module whose forward is the whole of scoring: sharded
    weights are gathered by hooks around a module's forward, and transformers' own would be called for its decoder
    alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        use_packed_attention(model)
        use_fused_norms(model)
        self.model = model

    def forward(self, pack: Pack, aux_layers: Sequence[int] = ()) -> Scores:
        """One pass of transformers' own model class over a pack; the LM head runs on response positions only."""
        hidden, aux = target_states(
            self.model.base_model, aux_layers, input_ids=pack.ids, position_ids=pack.positions, spans=pack.spans
        )
        predicting = hidden.flatten(0, 1).index_select(0, pack.at)
        logits = self.model.lm_head(predicting)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        return _score_logits(logits, pack, hidden, aux)


def _score_logits(logits: Tensor, pack: Pack, hidden: Tensor, aux: Tensor | None) -> Scores:
    processed = process_logits(logits, pack.sampling).log_softmax(-1)
    logprobs = _pick(processed, pack.token_ids)
    full = logprobs
    if not pack.sampling.plain or pack.sampling.any_greedy:
        scale = torch.where(pack.sampling.temperature > 0, pack.sampling.temperature, 1.0)
        full = _pick((logits / scale[:, None]).log_softmax(-1), pack.token_ids)
    return Scores(logprobs, full, *uncertainty(processed), hidden, aux)


@torch.no_grad()
def uncertainty(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """(entropy, spread) [N] of log probabilities [N,V], as in `Scores`; in place where it can be, since [N,V] is the
    largest tensor of a step."""
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)  # 0 * -inf is NaN
    weighted = logprobs.exp().mul_(finite)
    entropy = -weighted.sum(-1)
    spread = weighted.mul_(finite).sum(-1) - entropy.square()
    return entropy, spread.clamp_min_(0.0)  # a difference of large numbers, where a token is all but certain


def _pick(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    return logprobs.gather(-1, token_ids[:, None]).sum(-1)  # of one: no view, which sharding's hooks warn of
