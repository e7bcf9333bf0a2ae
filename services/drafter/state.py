"""DrafterState: everything a drafter trainer needs to go on in another slot, as plain values that pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from services.config.schema import ClusterConfig
from services.core.errors import DataError, WeightError
from services.models.drafter import ARCHITECTURES, drafter_names
from services.models.files import drafter_dir, model_dir, read_config, read_tensors
from services.models.layers import ModelSpec, model_spec
from services.models.target import check_tensors


class DrafterState(TypedDict):
    """`tensors`: the trainable tensors by name (float32, CPU). `optimizer`: AdamW's exp_avg and exp_avg_sq by name,
    both empty before the first update. `total_steps`: micro-steps so far, which also seeds the next one's sampling.
    `updates`: those that changed the drafter, AdamW's own step count."""

    tensors: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    total_steps: int
    updates: int


def fresh_state(tensors: Mapping[str, Tensor], spec: ModelSpec) -> DrafterState:
    """A state at step 0 around checked tensors. Raises WeightError for anything but exactly the drafter's tensors."""
    check_tensors(tensors, drafter_names(spec), "drafter")
    return DrafterState(
        tensors={name: t.detach().float().clone() for name, t in tensors.items()},
        optimizer={"exp_avg": {}, "exp_avg_sq": {}},
        total_steps=0,
        updates=0,
    )


def check_state(state: DrafterState, spec: ModelSpec) -> None:
    """Refuse a state that does not fit before anything of it is adopted."""
    names = drafter_names(spec)
    check_tensors(state["tensors"], names, "drafter")
    for part, moments in state["optimizer"].items():
        if moments:
            check_tensors(moments, names, f"drafter optimizer {part}")
    filled = {bool(moments) for moments in state["optimizer"].values()}
    if filled != {state["updates"] > 0}:
        raise WeightError(
            f"drafter load refused, nothing changed: optimizer state and updates {state['updates']} disagree"
        )


def read_drafter(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Trainable tensors of an exported drafter. Raises DataError when its config.json is of another model, WeightError
    when the tensors are not exactly the drafter's (zero matching tensors included)."""
    if not folder.is_dir():
        raise DataError(f"no drafter at {folder}: run `longtail warmup` to make one, or set drafter.train to false")
    config = read_config(folder)
    _check_config(config, spec, folder)
    tensors = read_tensors(folder)
    check_tensors(tensors, drafter_names(spec), "drafter")
    return tensors


def _check_config(config: Mapping[str, Any], spec: ModelSpec, folder: Path) -> None:
    wanted = ARCHITECTURES[spec.model_type]
    if wanted not in (config.get("architectures") or ()):
        raise DataError(
            f"{folder / 'config.json'} has architectures {config.get('architectures')}, but a {spec.model_type} target "
            f"needs ['{wanted}']: this drafter was made for another target or another method"
        )
    for key, have in (("hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size)):
        if config.get(key) != have:
            raise DataError(
                f"{folder / 'config.json'} has {key} {config.get(key)}, the target has {have}: "
                "use the drafter made for this target"
            )


def initial_drafter_state(config: ClusterConfig) -> DrafterState:
    """Step 0 of a run, from the `drafter` folder that belongs to the model folder."""
    spec = model_spec(read_config(model_dir(config.model.path)))
    return fresh_state(read_drafter(drafter_dir(config.model.path), spec), spec)
