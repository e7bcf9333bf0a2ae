"""Device and number format from config words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from services.core.errors import ConfigError


def pick_device(word: str) -> torch.device:
    """ "auto" takes CUDA when there is one. On CUDA, attention in this process does without cuDNN, which torch prefers
    on Hopper: it builds an execution plan for every new shape (some 0.1 s forward and backward), and here nearly every
    batch has its own."""
    if word == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is cuda but this machine shows no CUDA device: use auto or cpu")
    if word == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def capability() -> tuple[int, int] | None:
    """Compute capability of this process's first GPU; None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def pick_dtype(word: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[word]


def free_cache(device: torch.device) -> None:
    """Give the GPU back what torch's allocator keeps for later: rollout servers and trainers share one, and who does
    not compute should hold no more than its weights."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """On a GPU float32 matrices are multiplied in TF32 in here: ten bits of mantissa where float32 has 23, several
    times as fast. A drafter's gradients can do with that; what is drawn or verified may not depend on it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
