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
GROWN_FILE = "grown.json"  # of a model made larger without changing what it computes


def model_dir(path: str) -> Path:
    """The target's folder; "pocket" is the model shipped with Longtail. Raises DataError when it is not one."""
    folder = POCKET_DIR / "target" if path == "pocket" else Path(path)
    if not (folder / "config.json").is_file():
        remedy = "run `longtail warmup` to make it" if path == "pocket" else "give a Hugging Face model folder"
        raise DataError(f"no model at {folder}: config.json is missing; {remedy}")
    return folder


def drafter_dir(path: str, method: str) -> Path:
    """The drafter's folder, inside the target's folder or beside it: `drafter-<method>` where there is one (a warm-up
    of several methods makes it), else `drafter`."""
    folder = model_dir(path)
    places = [at / name for name in (f"drafter-{method}", "drafter") for at in (folder, folder.parent)]
    return next((place for place in places if place.is_dir()), places[-1])


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json as a mapping."""
    return _read_json(folder / "config.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} does not hold a JSON object")
    return found


def read_grown(folder: Path) -> dict[str, Any] | None:
    """What a grown model folder was grown from (keys grown_from, source_shape, source_parameters, parameters,
    new_weights, note); None for any other. Figures measured with a grown model must say so."""
    return _read_json(folder / GROWN_FILE) if (folder / GROWN_FILE).is_file() else None


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
