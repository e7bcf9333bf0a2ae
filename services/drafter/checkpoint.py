"""Selective asynchronous checkpoints of a drafter trainer: only what it trains and its optimizer's moments, written in
the background from the copy that a snapshot makes anyway (paper section on the spot trainer; embedding and LM head are
the target's and stay out). The files are those of services/weights/checkpoint.py.

    tensors/NAME, exp_avg/NAME, exp_avg_sq/NAME
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor

from services.config.schema import ClusterConfig
from services.core.checkpoints import whole_checkpoints
from services.core.errors import DataError
from services.drafter.state import DrafterState, check_state, initial_drafter_state, new_stamp
from services.models.drafter import DrafterMethod
from services.models.files import model_dir, read_config
from services.models.layers import model_spec
from services.models.methods import drafter_method
from services.weights.checkpoint import (
    CheckpointKind,
    CheckpointWriter,
    Snapshot,
    damaged,
    read_manifest,
    read_state,
)

FORMAT = 1
KIND = CheckpointKind("drafter", "drafter.checkpoint_dir")
MOMENTS = ("exp_avg", "exp_avg_sq")


def checkpoint_writer(folder: Path, owner: str, keep: int = 2) -> CheckpointWriter:
    """Slots take turns in training, so each has a writer of its own for the one folder."""
    return CheckpointWriter(folder, KIND, owner, keep)


def snapshot_of(state: DrafterState, method: DrafterMethod) -> Snapshot:
    about = {
        "format": FORMAT,
        **_identity(method),
        "total_steps": state["total_steps"],
        "updates": state["updates"],
    }
    return Snapshot(state["total_steps"], flat_state(state), about)


def read_checkpoint(folder: Path, method: DrafterMethod) -> DrafterState | None:
    """The newest state in `folder`; None when there is none yet. Raises DataError for one that is damaged or of another
    drafter: going on from an older one is the user's choice."""
    found = whole_checkpoints(folder)
    return _read(found[-1], method) if found else None


def starting_state(config: ClusterConfig) -> DrafterState:
    """What a run's drafter begins with: its newest checkpoint, else the folder that belongs to the model."""
    folder = config.drafter.checkpoint_dir
    method = drafter_method(config.drafter, model_spec(read_config(model_dir(config.model.path))))
    kept = None if folder is None else read_checkpoint(folder, method)
    return initial_drafter_state(config) if kept is None else kept


def _read(place: Path, method: DrafterMethod) -> DrafterState:
    manifest = read_manifest(place, KIND)
    try:
        problem = _problem(manifest, method)
        if problem:
            raise DataError(f"drafter checkpoint {place}: {problem}: use another drafter.checkpoint_dir")
        state = _nested(read_state(place, manifest, KIND), manifest)
    except (KeyError, ValueError) as error:
        raise damaged(place, KIND, error) from None
    check_state(state, method)
    return state


def _problem(manifest: dict[str, Any], method: DrafterMethod) -> str:
    if manifest["format"] != FORMAT:
        return f"format {manifest['format']}, this version reads {FORMAT}"
    wanted = _identity(method)
    if {name: manifest.get(name) for name in wanted} != wanted:
        return f"it is of another drafter or target than {wanted}"
    return ""


def _identity(method: DrafterMethod) -> dict[str, Any]:
    target, own = method.target, method.draft_ids
    rows = {} if own is None else {"draft_ids": hashlib.sha256(repr(own).encode()).hexdigest()}
    return {
        "method": method.name,
        "model_type": target.model_type,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        **rows,
    }


def flat_state(state: DrafterState) -> dict[str, Tensor]:
    """All tensors of a state under `part/name`."""
    parts = {"tensors": state["tensors"], **state["optimizer"]}
    return {f"{part}/{name}": t.contiguous() for part, named in parts.items() for name, t in named.items()}


def _nested(flat: dict[str, Tensor], manifest: dict[str, Any]) -> DrafterState:
    parts: dict[str, dict[str, Tensor]] = {"tensors": {}, **{m: {} for m in MOMENTS}}
    for key, tensor in flat.items():
        part, name = key.split("/", 1)
        parts[part][name] = tensor
    return DrafterState(
        tensors=parts.pop("tensors"),
        optimizer=parts,
        total_steps=int(manifest["total_steps"]),
        updates=int(manifest["updates"]),
        stamp=new_stamp(),
    )
