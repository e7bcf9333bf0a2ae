"""Rotary position frequencies: default, linear and Llama-3 scaling (Su et al. 2021; Llama 3.1 model card)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.core.errors import DataError

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def check_rope(rope: Mapping[str, Any]) -> None:
    """DataError for a scaling that is not supported, or lacks a number: with other frequencies than it was trained
    with, a model is wrong at every position, and nothing else would tell."""
    kind = rope["rope_type"]
    if kind not in _NEEDED:
        raise DataError(f"rope_type {kind!r} is not supported: {', '.join(_NEEDED)} are")
    missing = [name for name in _NEEDED[kind] if name not in rope]
    if missing:
        raise DataError(
            f"rope_type {kind!r} in config.json lacks {', '.join(missing)}: take the model's own config.json"
        )
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise DataError("partial_rotary_factor other than 1 is not supported: take a model that rotates whole heads")


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Radians per position for each pair of dimensions, [head_dim / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / float(rope["rope_theta"]) ** exponents
    check_rope(rope)
    kind = rope["rope_type"]
    if kind == "linear":
        return base / float(rope["factor"])
    return _llama3(base, rope) if kind == "llama3" else base


def _llama3(base: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended smoothly."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = float(rope["original_max_position_embeddings"]) * base / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return base / float(rope["factor"]) * (1 - blend) + base * blend
