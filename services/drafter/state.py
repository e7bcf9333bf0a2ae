"""DrafterState: everything a drafter trainer needs to go on in another slot, as plain values that pickle."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from services.config.schema import ClusterConfig
from services.core.errors import DataError, WeightError
from services.models.drafter import DrafterMethod
from services.models.files import model_dir, read_config, read_tensors
from services.models.layers import model_spec
from services.models.methods import drafter_folder, drafter_method
from services.models.target import check_tensors
from services.models.vocabulary import D2T, T2D, draft_ids


class DrafterState(TypedDict):
    """`tensors`: the trainable tensors by name (float32, CPU). `optimizer`: AdamW's exp_avg and exp_avg_sq by name,
    both empty before the first update. `total_steps`: micro-steps so far, which also seeds the next one's sampling.
    `updates`: those that changed the drafter, AdamW's own step count. `stamp` names these very values, so that a
    trainer that holds them already need not copy a gigabyte of them again."""

    tensors: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    total_steps: int
    updates: int
    stamp: str


def new_stamp() -> str:
    return uuid.uuid4().hex


def fresh_state(tensors: Mapping[str, Tensor], method: DrafterMethod) -> DrafterState:
    """A state at step 0 around checked tensors. Raises WeightError for anything but exactly the drafter's tensors."""
    check_tensors(tensors, method.names(), "drafter")
    return DrafterState(
        tensors={name: t.detach().float().clone() for name, t in tensors.items()},
        optimizer={"exp_avg": {}, "exp_avg_sq": {}},
        total_steps=0,
        updates=0,
        stamp=new_stamp(),
    )


def check_state(state: DrafterState, method: DrafterMethod) -> None:
    """Refuse a state that does not fit before anything of it is adopted."""
    names = method.names()
    check_tensors(state["tensors"], names, "drafter")
    for part, moments in state["optimizer"].items():
        if moments:
            check_tensors(moments, names, f"drafter optimizer {part}")
    filled = {bool(moments) for moments in state["optimizer"].values()}
    if filled != {state["updates"] > 0}:
        raise WeightError(
            f"drafter load refused, nothing changed: optimizer state and updates {state['updates']} disagree"
        )


def merge_states(states: Sequence[DrafterState], micro_steps: Sequence[int]) -> DrafterState:
    """The average of states that all began from one state, weighted by the micro-steps each made since. Moments are
    averaged as well (zero where a state has none yet); `total_steps` counts everybody's work, `updates` the longest
    row of updates, since AdamW's bias correction asks how old the moments are."""
    begun = {state["total_steps"] - count for state, count in zip(states, micro_steps, strict=True)}
    assert len(begun) == 1 and min(micro_steps) > 0, f"states of different beginnings: {sorted(begun)}"
    shares = [count / sum(micro_steps) for count in micro_steps]

    def average(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        names = {name for part in parts for name in part}
        kept = [(share, part) for share, part in zip(shares, parts, strict=True) if part]
        return {name: torch.stack([share * part[name] for share, part in kept]).sum(0) for name in sorted(names)}

    return DrafterState(
        tensors=average([s["tensors"] for s in states]),
        optimizer={part: average([s["optimizer"][part] for s in states]) for part in states[0]["optimizer"]},
        total_steps=begun.pop() + sum(micro_steps),
        updates=max(s["updates"] for s in states),
        stamp=new_stamp(),
    )


def read_drafter(folder: Path, method: DrafterMethod) -> dict[str, Tensor]:
    """Trainable tensors of an exported drafter. Raises DataError when its config.json is of another method or target,
    WeightError when the tensors are not exactly the drafter's (zero matching tensors included)."""
    if not folder.is_dir():
        raise DataError(
            f"no drafter at {folder}: run `longtail warmup` to make one, or choose strategies without drafter 'eagle'"
        )
    problem = next(method.config_problems(read_config(folder)), None)
    if problem is not None:
        raise DataError(f"{folder / 'config.json'} {problem}")
    tensors = read_tensors(folder)
    for name in method.engine_zeros().keys() & tensors.keys():
        if bool(tensors.pop(name).any()):
            raise DataError(f"{folder}: {name} is not zero, but drafters here have none: train the drafter without it")
    _take_mapping(folder, tensors, method)
    check_tensors(tensors, method.names(), "drafter")
    return tensors


def _take_mapping(folder: Path, tensors: dict[str, Tensor], method: DrafterMethod) -> None:
    """Remove the mapping of a head's rows to tokens, once it is known to be the method's."""
    mapped = {name: tensors.pop(name) for name in (D2T, T2D) if name in tensors}
    if mapped and method.draft_ids is None:
        raise DataError(
            f"{folder} maps a reduced vocabulary to the target's ({', '.join(sorted(mapped))}), but its config.json "
            "has no draft_vocab_size: bring it in again with `longtail drafter import`"
        )
    own = method.draft_ids
    if own is not None and draft_ids(mapped, len(own), method.target.vocab_size, str(folder)) != own:
        raise DataError(
            f"{folder}: {D2T} maps the rows of the head to other tokens than drafter.path: use the drafter that this "
            "run began with"
        )


def initial_drafter_state(config: ClusterConfig) -> DrafterState:
    """Step 0 of a run, from the `drafter` folder that belongs to the model folder."""
    method = drafter_method(config.drafter, model_spec(read_config(model_dir(config.model.path))))
    return fresh_state(read_drafter(drafter_folder(config), method), method)
