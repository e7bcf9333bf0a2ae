"""Write a drafter as a model folder: its tensors, a config.json of its own, and a short card."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.models.drafter import DrafterMethod
from services.models.target import check_tensors

_CARD = """# {title} drafter

Drafts tokens for speculative decoding of one target ({model_type}, hidden size {hidden_size}, {vocab_size} tokens). One
decoder layer over the embedding of the next token and {reads}. Embedding and LM head
are the target's and not in this folder: the drafter is of use only beside the target it was trained for.

- tensors: {count} trained, {parameters} parameters, `model.safetensors`
- architecture: {architecture}
- trained by Longtail for {total_steps} micro-steps
"""


def write_drafter_folder(
    tensors: Mapping[str, Tensor],
    method: DrafterMethod,
    target_config: Mapping[str, Any],
    folder: Path,
    total_steps: int = 0,
) -> None:
    """Export trainable tensors beside the config of their target (its config.json as a mapping).

    The file also holds the zeros that SGLang's class of the drafter wants to find. Raises WeightError for anything but
    exactly the drafter's tensors. Each file appears whole or not at all.
    """
    check_tensors(tensors, method.names(), "drafter export")
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    dtype = own["fc.weight"].dtype
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in method.engine_zeros().items()}
    partial = folder / "model.safetensors.partial"
    save_file(own | zeros, partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    _write(folder / "config.json", json.dumps(method.folder_config(target_config), indent=2, sort_keys=True) + "\n")
    card = _CARD.format(
        title=method.title,
        model_type=method.target.model_type,
        hidden_size=method.target.hidden_size,
        vocab_size=method.target.vocab_size,
        reads=method.reads,
        count=len(own),
        parameters=sum(t.numel() for t in own.values()),
        architecture=method.architecture,
        total_steps=total_steps,
    )
    _write(folder / "README.md", card)


def _write(file: Path, text: str) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
