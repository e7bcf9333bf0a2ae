"""Device and number format from config words."""

from __future__ import annotations

import torch

from services.core.errors import ConfigError


def pick_device(word: str) -> torch.device:
    """ "auto" takes CUDA when there is one."""
    if word == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is cuda but this machine shows no CUDA device: use auto or cpu")
    return torch.device("cuda" if word != "cpu" and torch.cuda.is_available() else "cpu")


def pick_dtype(word: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[word]
