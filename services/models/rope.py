"""Rotary position frequencies: default, linear and Llama-3 scaling (Su et al. 2021; Llama 3.1 model card)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.core.errors import DataError


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Radians per position for each pair of dimensions, [head_dim / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / float(rope["rope_theta"]) ** exponents
    kind = rope["rope_type"]
    if kind == "default":
        return base
    if kind == "linear":
        return base / float(rope["factor"])
    if kind == "llama3":
        return _llama3(base, rope)
    raise DataError(f"rope_type {kind!r} is not supported: default, linear and llama3 are")


def _llama3(base: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended smoothly."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = float(rope["original_max_position_embeddings"]) * base / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return base / float(rope["factor"]) * (1 - blend) + base * blend
