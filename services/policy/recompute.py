"""Activation checkpointing (Chen et al. 2016, "Training deep nets with sublinear memory cost"), layer by layer."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def recompute_layers(model: PreTrainedModel) -> None:
    """Of each decoder layer only the input is kept for the backward pass, which runs the layer's forward again: about a
    third more arithmetic. In place, names of weights and hooks stay as they are.

    transformers' own switch works in training mode alone, in which the policy never is. There is no dropout, so random
    numbers need no keeping.
    """
    for layer in model.base_model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
