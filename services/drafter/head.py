"""The target's embedding and LM head for the drafter trainer: read-only copies, replaced per policy version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.core.errors import DataError
from services.models.layers import ModelSpec
from services.models.target import EMBED, HEAD, check_tensors


@dataclass(frozen=True)
class TargetHead:
    """embed and head [V,H], float32, without gradients; the same tensor when the model ties them."""

    embed: Tensor
    head: Tensor
    policy_version: int


def target_head(
    tensors: Mapping[str, Tensor], spec: ModelSpec, policy_version: int, device: torch.device
) -> TargetHead:
    """Take what the drafter needs out of a published policy. Raises WeightError when it is missing, has another shape
    or is not finite."""
    wanted = {EMBED: (spec.vocab_size, spec.hidden_size)}
    if not spec.tied:
        wanted[HEAD] = (spec.vocab_size, spec.hidden_size)
    found = {name: tensors[name] for name in wanted if name in tensors}
    check_tensors(found, wanted, "target head")
    # copies: in one process the policy trainer goes on writing into what it published
    copies = {name: t.detach().to(device, torch.float32, copy=True) for name, t in found.items()}
    return TargetHead(copies[EMBED], copies.get(HEAD, copies[EMBED]), policy_version)


def read_target_head(folder: Path, spec: ModelSpec, device: torch.device) -> TargetHead:
    """Version 0, from the target's folder; other tensors stay on disk."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in (EMBED, HEAD) if name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise DataError(f"{file} is damaged or truncated: {error}") from error
    return target_head(found, spec, 0, device)
