"""Selective asynchronous checkpoints of a drafter trainer: only what it trains and its optimizer's moments, written in
the background from the copy that a snapshot makes anyway (paper section on the spot trainer; embedding and LM head are
the target's and stay out).

    FOLDER/step-0000001234/state.safetensors     tensors/NAME, exp_avg/NAME, exp_avg_sq/NAME
    FOLDER/step-0000001234/manifest.json         what it is, with the size and SHA-256 of the other file

A checkpoint appears whole or not at all: its folder is renamed into place when both files are on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.config.schema import ClusterConfig
from services.core.errors import DataError, WaitTimeoutError
from services.drafter.state import DrafterState, check_state, initial_drafter_state, new_stamp
from services.models.drafter import DrafterMethod
from services.models.files import model_dir, read_config
from services.models.layers import model_spec
from services.models.methods import drafter_method

FORMAT = 1
STATE_FILE, MANIFEST = "state.safetensors", "manifest.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 2**20


class CheckpointWriter:
    """Writes states into `folder`, the newest `keep` of them stay. `owner` tells writers of one folder apart: slots
    take turns in training, and an old one's write may still be under way."""

    def __init__(self, folder: Path, method: DrafterMethod, owner: str, keep: int = 2) -> None:
        self._folder, self._method, self._keep = folder, method, keep
        self._partial = folder / f".partial-{owner}"
        self._changed = threading.Condition()
        self._waiting: DrafterState | None = None
        self._busy = False
        self._failure: OSError | None = None

    def save(self, state: DrafterState) -> None:
        """Returns at once; `state` must not change any more. One that comes while another still waits takes its place.
        Raises DataError when an earlier one could not be written."""
        self._raise_failure()
        with self._changed:
            self._waiting = state
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._run, name="drafter-checkpoint", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """Returns when everything saved is on the disk."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy, timeout_s):
                raise WaitTimeoutError(f"the drafter checkpoint in {self._folder} was not written in {timeout_s:.0f} s")
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise DataError(
                f"a drafter checkpoint could not be written to {self._folder}: {self._failure}; make room or set "
                "another drafter.checkpoint_dir"
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                state, self._waiting = self._waiting, None
                if state is None or self._failure is not None:
                    self._busy = False
                    self._changed.notify_all()
                    return
            try:
                self._write(state)
            except OSError as error:  # told by the next call
                self._failure = error

    def _write(self, state: DrafterState) -> None:
        place = self._folder / f"step-{state['total_steps']:010d}"
        if place.exists():
            return  # another slot began where this one ended
        shutil.rmtree(self._partial, ignore_errors=True)  # of a writer that was killed
        self._partial.mkdir(parents=True)
        file = self._partial / STATE_FILE
        save_file(flat_state(state), file)
        _sync(file)
        manifest = {
            "format": FORMAT,
            **_identity(self._method),
            "total_steps": state["total_steps"],
            "updates": state["updates"],
            "bytes": file.stat().st_size,
            "sha256": _digest(file),
        }
        (self._partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _sync(self._partial / MANIFEST)
        self._move_to(place)
        _sync(self._folder)
        for old in checkpoints(self._folder)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _move_to(self, place: Path) -> None:
        try:
            os.replace(self._partial, place)
        except OSError:
            if not place.is_dir():
                raise
            shutil.rmtree(self._partial)  # another slot's writer was first with this step


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir())


def read_checkpoint(folder: Path, method: DrafterMethod) -> DrafterState | None:
    """The newest state in `folder`; None when there is none yet. Raises DataError for one that is damaged or of another
    drafter: going on from an older one is the user's choice."""
    found = checkpoints(folder)
    return _read(found[-1], method) if found else None


def starting_state(config: ClusterConfig) -> DrafterState:
    """What a run's drafter begins with: its newest checkpoint, else the folder that belongs to the model."""
    folder = config.drafter.checkpoint_dir
    method = drafter_method(config.drafter, model_spec(read_config(model_dir(config.model.path))))
    kept = None if folder is None else read_checkpoint(folder, method)
    return initial_drafter_state(config) if kept is None else kept


def _read(place: Path, method: DrafterMethod) -> DrafterState:
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        problem = _problem(manifest, place / STATE_FILE, method)
        if problem:
            raise DataError(f"drafter checkpoint {place}: {problem}")
        state = _nested(load_file(place / STATE_FILE), manifest)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataError(
            f"drafter checkpoint {place} is damaged ({type(error).__name__}: {error}): remove its folder to go on from "
            "the one before"
        ) from None
    check_state(state, method)
    return state


def _problem(manifest: dict[str, Any], file: Path, method: DrafterMethod) -> str:
    if manifest["format"] != FORMAT:
        return f"format {manifest['format']}, this version reads {FORMAT}: use another drafter.checkpoint_dir"
    wanted = _identity(method)
    if {name: manifest[name] for name in wanted} != wanted:
        return f"it is of another drafter or target than {wanted}: use another drafter.checkpoint_dir"
    if file.stat().st_size != manifest["bytes"] or _digest(file) != manifest["sha256"]:
        return f"{STATE_FILE} is not what was written: remove the folder to go on from the checkpoint before"
    return ""


def _identity(method: DrafterMethod) -> dict[str, Any]:
    target = method.target
    return {
        "method": method.name,
        "model_type": target.model_type,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
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


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
