"""Where model folders are and what lies in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from services.core.errors import DataError

POCKET_DIR = Path(__file__).resolve().parents[2] / "deploy" / "pocket"


def model_dir(path: str) -> Path:
    """The target's folder; "pocket" is the model shipped with Longtail. Raises DataError when it is not one."""
    folder = POCKET_DIR / "target" if path == "pocket" else Path(path)
    if not (folder / "config.json").is_file():
        remedy = "run `longtail warmup` to make it" if path == "pocket" else "give a Hugging Face model folder"
        raise DataError(f"no model at {folder}: config.json is missing; {remedy}")
    return folder


def drafter_dir(path: str) -> Path:
    """The drafter's folder, named `drafter`: beside the target's folder, or inside it."""
    folder = model_dir(path)
    inside = folder / "drafter"
    return inside if inside.is_dir() else folder.parent / "drafter"


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json as a mapping."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"cannot read {file}: {error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{file} does not hold a JSON object")
    return config


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files, by Hugging Face name, on the CPU."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"no *.safetensors in {folder}: convert the checkpoint to safetensors first")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except SafetensorError as error:
            raise DataError(f"{file} is damaged or truncated: {error}") from error
    return tensors
