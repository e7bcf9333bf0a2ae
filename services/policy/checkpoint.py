"""Checkpoints of a run, written by the policy trainer, which holds most of what is in them.

    policy/NAME                               weights, float32
    optimizer/KEY/NAME                        AdamW's state of each weight: exp_avg, exp_avg_sq, step
    drafter/live/..., drafter/served/...      training states of the drafter that trains and of the one that is served;
                                              only the first when they are one

The manifest has the plain values: policy version, shape of the model, the coordinator's note. Nothing here holds random
numbers: those of rollouts and of drafter training follow from the run's seed, the step and the micro-step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.core.checkpoints import CheckpointNote, read_note
from services.core.errors import DataError, WeightError
from services.models.layers import ModelSpec
from services.policy.trainer import PolicyTrainer
from services.weights.checkpoint import CheckpointKind, Snapshot, damaged, read_manifest, read_state

FORMAT = 1
KIND = CheckpointKind("run", "run.dir")
POLICY, OPTIMIZER, LIVE, SERVED = "policy", "optimizer", "drafter/live", "drafter/served"

# A drafter's training state, whose form is the drafter trainer's own business: mappings of tensors and plain values.
DrafterTree = Mapping[str, Any]


@dataclass(frozen=True)
class Restored:
    """What a checkpoint brought back beside the policy. `served` is `live` itself when the two were one."""

    note: CheckpointNote
    live: DrafterTree | None
    served: DrafterTree | None


def take_snapshot(
    trainer: PolicyTrainer,
    spec: ModelSpec,
    note: CheckpointNote,
    live: DrafterTree | None = None,
    served: DrafterTree | None = None,
) -> Snapshot:
    """Copies on the CPU of everything to go on from after step `note.step`; `served` None: it is `live`."""
    tensors = trainer.state()
    plain: dict[str, Any] = {}
    for prefix, tree in ((LIVE, live), (SERVED, served)):
        if tree is not None:
            plain[prefix] = _split(tree, prefix, tensors)
    about = {
        "format": FORMAT,
        "model": _identity(spec),
        "policy_version": trainer.version,
        "note": note.as_dict(),
        "drafters": plain,
    }
    return Snapshot(note.step, tensors, about)


def restore(place: Path, trainer: PolicyTrainer, spec: ModelSpec) -> Restored:
    """Bring `trainer` to where it was. Raises DataError for a checkpoint that is damaged or of another model."""
    manifest = read_manifest(place, KIND)
    try:
        _check_kind(place, manifest, spec)
        tensors = read_state(place, manifest, KIND)
        note, version = read_note(manifest["note"]), int(manifest["policy_version"])
        drafters = {prefix: _join(plain, prefix, tensors) for prefix, plain in manifest["drafters"].items()}
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(place, KIND, error) from None
    try:
        trainer.load_state(tensors, version)
    except WeightError as error:
        raise DataError(f"{place} does not fit the model: {error}; use another run.id") from None
    live = drafters.get(LIVE)
    return Restored(note, live, drafters.get(SERVED, live))


@dataclass(frozen=True)
class ServedWeights:
    """What was served when the checkpoint was written; no drafter where there was none."""

    policy_version: int
    policy: dict[str, Tensor]
    drafter_version: int | None
    drafter: dict[str, Tensor] | None


def read_served(place: Path, spec: ModelSpec) -> ServedWeights:
    """The weights alone, without what training needs. Raises DataError as `restore` does."""
    manifest = read_manifest(place, KIND)
    try:
        _check_kind(place, manifest, spec)
        drafters, note = manifest["drafters"], read_note(manifest["note"])
        source = SERVED if SERVED in drafters else LIVE if LIVE in drafters else None
        own = f"{source}/tensors/"
        tensors = read_state(place, manifest, KIND, (f"{POLICY}/", own))
        version = int(manifest["policy_version"])
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(place, KIND, error) from None
    drafter = _below(tensors, own) if source is not None and note.drafter_version is not None else None
    drafter_version = note.drafter_version if drafter is not None else None
    return ServedWeights(version, _below(tensors, f"{POLICY}/"), drafter_version, drafter)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _check_kind(place: Path, manifest: Mapping[str, Any], spec: ModelSpec) -> None:
    if manifest["format"] != FORMAT:
        raise DataError(f"{place}: format {manifest['format']}, this version reads {FORMAT}: use another run.id")
    if manifest["model"] != _identity(spec):
        raise DataError(
            f"{place} is of another model, {manifest['model']} where model.path has {_identity(spec)}: bring back "
            "the model of this run, or use another run.id"
        )


def _identity(spec: ModelSpec) -> dict[str, Any]:
    return {
        "model_type": spec.model_type,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "vocab_size": spec.vocab_size,
    }


def _split(tree: Mapping[str, Any], prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The tree's plain values; its tensors go into `tensors` by their path."""
    plain: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}/{key}"
        if isinstance(value, Mapping):
            plain[key] = _split(value, path, tensors)
        elif isinstance(value, torch.Tensor):
            tensors[path] = value.contiguous()
        else:
            plain[key] = value
    return plain


def _join(plain: Mapping[str, Any], prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tree that `_split` took apart. Names of tensors hold no slash."""
    tree: dict[str, Any] = {}
    for key, value in plain.items():
        tree[key] = _join(value, f"{prefix}/{key}", tensors) if isinstance(value, Mapping) else value
    start = f"{prefix}/"
    own = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
    return tree | {name: t for name, t in own.items() if "/" not in name}
