"""What a checkpoint of a run says in plain values, and how checkpoint folders are called.

FOLDER/step-0000000012/manifest.json         what it is; there is none without it
FOLDER/step-0000000012/state.safetensors     the tensors (services/weights/checkpoint.py)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.core.selector import SelectorState
from services.core.types import HiddenStateChunk

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{10})")


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Where a run's checkpoints go, an absolute path inside its run folder, and which one it goes on from. Policy
    versions below `least_version` may have gone out already, with other weights."""

    folder: Path
    start: Path | None = None
    least_version: int = 0


@dataclass(frozen=True, slots=True)
class DataPosition:
    """`fingerprint` of the training prompts in their order; `since`: the last step that took prompts of another set.
    Which prompts a step takes follows from its number, those of dynamic sampling included, so this is all there is of
    a cursor."""

    fingerprint: str
    since: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointNote:
    """What a checkpoint keeps beside the tensors. `step`: the last one trained on. `drafter_version`: of the drafter
    served, None without one; `drafter_ahead`: the one that trains has learned more. `buffer`: the chunks that
    the drafter trainers had to learn from. Their data is not kept: it is the hidden states of policies that are gone,
    a hundred times the size of a checkpoint, and the next step brings as much of the policy that is there. `selectors`:
    what each slot's has learned; `worth`: what is known about whether training the drafter pays."""

    step: int
    drafter_version: int | None
    data: DataPosition
    drafter_ahead: bool = False
    buffer: tuple[HiddenStateChunk, ...] = ()
    selectors: tuple[SelectorState | None, ...] = ()
    worth: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "drafter_version": self.drafter_version,
            "data": asdict(self.data),
            "drafter_ahead": self.drafter_ahead,
            "buffer": [asdict(chunk) for chunk in self.buffer],
            "selectors": [None if state is None else asdict(state) for state in self.selectors],
            "worth": self.worth,
        }


def read_note(row: Mapping[str, Any]) -> CheckpointNote:
    """The note that `as_dict` made; KeyError and TypeError for anything else."""
    return CheckpointNote(
        step=row["step"],
        drafter_version=row["drafter_version"],
        data=DataPosition(**row["data"]),
        drafter_ahead=row["drafter_ahead"],
        buffer=tuple(HiddenStateChunk(**chunk) for chunk in row["buffer"]),
        selectors=tuple(None if state is None else SelectorState(**state) for state in row["selectors"]),
        worth=row["worth"],
    )


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:010d}"


def whole_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, oldest first; what a killed writer left behind has another name."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(place for place in found if _NAME.fullmatch(place.name) and place.is_dir())


def step_of(place: Path) -> int:
    step = step_number(place.name)
    assert step is not None, f"{place} is no checkpoint"
    return step


def step_number(name: str) -> int | None:
    """None for what is no checkpoint folder's name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])
