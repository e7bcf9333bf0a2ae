"""Target states for the drafter from one forward pass of a transformers decoder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


def target_states(decoder: nn.Module, aux_layers: Sequence[int], **inputs: Any) -> tuple[Tensor, Tensor | None]:
    """Run `decoder` (`model.base_model`) on `inputs`: its last hidden state after the final norm [R,W,H], and the
    outputs of `aux_layers` side by side [R,W,A*H], cut off from the graph; None without aux layers.

    The output of layer k is the residual stream behind it: transformers' `hidden_states[k + 1]`, and what SGLang takes
    on entry to layer k + 1. Hooks keep these layers only, where `output_hidden_states` would keep all.
    """
    kept: dict[int, Tensor] = {}

    def keep(layer: int, output: Tensor) -> None:
        kept[layer] = output.detach()

    with ExitStack() as hooks:
        for k in aux_layers:
            hook = decoder.layers[k].register_forward_hook(lambda _m, _i, out, k=k: keep(k, out))  # type: ignore[index,union-attr]
            hooks.callback(hook.remove)
        hidden = decoder(**inputs, use_cache=False).last_hidden_state
    return hidden, torch.cat([kept[k] for k in aux_layers], dim=-1) if aux_layers else None
