"""Scoring without packs: a rollout by itself through transformers' own attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.core.types import Rollout
from services.models.sampling import process_logits, sampling_tensors


@torch.no_grad()
def processed(model: PreTrainedModel, rollout: Rollout) -> tuple[Tensor, Any]:
    """([T,V] log probabilities under the rollout's sampling, what the model said)."""
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([(*rollout.prompt_ids, *rollout.response_ids)])
    out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    logits = out.logits[0, len(rollout.prompt_ids) - 1 : -1].float()
    sampling = sampling_tensors([rollout.sampling] * len(logits), logits.device)
    return process_logits(logits, sampling).log_softmax(-1), out


def one_by_one(model: PreTrainedModel, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """(logprobs [T] of its tokens, the last hidden states [L,H])."""
    told, out = processed(model, rollout)
    return told.gather(-1, torch.tensor(list(rollout.response_ids))[:, None])[:, 0], out.hidden_states[-1][0]
