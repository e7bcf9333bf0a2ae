"""Write a drafter as a model folder: its tensors, a config.json of its own, and a card."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from services.drafter.card import Measured, Origin, drafter_card
from services.drafter.layouts import DrafterFiles, Layout, Verifier, in_layout
from services.models.drafter import DrafterMethod


def write_drafter_folder(
    tensors: Mapping[str, Tensor],
    method: DrafterMethod,
    target_config: Mapping[str, Any],
    folder: Path,
    total_steps: int = 0,
) -> None:
    """Export trainable tensors beside the config of their target (its config.json as a mapping), as SGLang loads them.

    The file also holds the constants that SGLang's class of the drafter wants to find. Raises WeightError for anything
    but exactly the drafter's tensors. Each file appears whole or not at all.
    """
    files = in_layout("sglang", tensors, method, Verifier(target_config, ""))
    count = sum(t.numel() for t in tensors.values())
    write_files(files, drafter_card(method, count, total_steps, method.architecture), folder)


def write_export(
    tensors: Mapping[str, Tensor],
    method: DrafterMethod,
    layout: Layout,
    verifier: Verifier,
    origin: Origin,
    measured: Measured | None,
    folder: Path,
) -> None:
    """A drafter to be deployed, in one of the layouts, with the card that says where it comes from. Raises as
    `write_drafter_folder`."""
    files = in_layout(layout, tensors, method, verifier)
    count = sum(t.numel() for t in tensors.values())
    architecture = ", ".join(files.config["architectures"])
    card = drafter_card(method, count, origin.total_steps, architecture, layout, origin, measured)
    write_files(files, card, folder)


def write_files(files: DrafterFiles, card: str, folder: Path) -> None:
    """Each file appears whole or not at all, config.json last: without it the folder is no drafter."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file(dict(files.tensors), partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    _write(folder / "README.md", card)
    _write(folder / "config.json", json.dumps(files.config, indent=2, sort_keys=True) + "\n")


def _write(file: Path, text: str) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
