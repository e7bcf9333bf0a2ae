"""Write a drafter as a model folder: the trainable tensors, a config.json of its own, and a short card."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from services.models.drafter import ARCHITECTURES, drafter_names
from services.models.layers import model_spec
from services.models.target import check_tensors

_DROP = ("layer_types", "max_window_layers", "transformers_version")  # of the target's depth, or of its own file only

_CARD = """# EAGLE drafter

Drafts tokens for speculative decoding of one target ({model_type}, hidden size {hidden_size}, {vocab_size} tokens). One
decoder layer over [embedding of the next token ; the target's last hidden state]. Embedding and LM head are
the target's and not in this folder: the drafter is of use only beside the target it was trained for.

- tensors: {count}, {parameters} parameters, `model.safetensors`
- architecture: {architecture}
- trained by Longtail for {total_steps} micro-steps
"""


def write_drafter_folder(
    tensors: Mapping[str, Tensor], target_config: Mapping[str, Any], folder: Path, total_steps: int = 0
) -> None:
    """Export trainable tensors beside the config of their target (its config.json as a mapping).

    Raises WeightError for anything but exactly the drafter's tensors. Each file appears whole or not at all.
    """
    spec = model_spec(target_config)
    check_tensors(tensors, drafter_names(spec), "drafter export")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    architecture = ARCHITECTURES[spec.model_type]
    config = {key: value for key, value in target_config.items() if key not in _DROP}
    config |= {"architectures": [architecture], "num_hidden_layers": 1, "tie_word_embeddings": False}
    _write(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    card = _CARD.format(
        model_type=spec.model_type,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        count=len(tensors),
        parameters=sum(t.numel() for t in tensors.values()),
        architecture=architecture,
        total_steps=total_steps,
    )
    _write(folder / "README.md", card)


def _write(file: Path, text: str) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
