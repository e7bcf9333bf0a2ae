"""Verification of a round without drafts, in an engine that verifies sampled drafts by rejection.

SGLang 0.5.17 has one Triton kernel for such engines, and Triton cannot compile it for a single node per request: its
loop over the drafts is empty then. What is left to do without drafts is one draw from the target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHAIN_SAMPLING = "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton"


def verify_chain(original: Callable[..., None], **tensors: Any) -> None:
    """SGLang's chain verification; its arguments are what it calls it with, and results are written in place."""
    if tensors["candidates"].shape[1] > 1:
        original(**tensors)
        return
    roots, probs = tensors["retrive_index"][:, 0], tensors["target_probs"][:, 0]
    tensors["accept_index"][:, 0] = roots
    tensors["accept_token_num"].zero_()
    tensors["predicts"][roots] = draw(probs, tensors["uniform_samples_for_final_sampling"]).int()


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The tokens [B] in which `uniforms` [B] of [0, 1) fall along each row of `probs` [B,V], which need not sum to one
    exactly. A token of probability zero is never drawn, whatever rounding does."""
    reached = probs.cumsum(-1)
    whole = reached[:, -1:]
    at = torch.searchsorted(reached, uniforms[:, None] * whole, right=True)
    last = torch.searchsorted(reached, whole.contiguous())  # the first token at which all of it is reached
    return at.minimum(last)[:, 0]
