"""Checkpoint folders: tensors and a manifest, written in the background, whole or not at all.

    FOLDER/step-0000001234/state.safetensors     tensors by name
    FOLDER/step-0000001234/manifest.json         what it is, with the size and SHA-256 of the other file

A folder is renamed into place when both files are on the disk, so what is killed in the middle leaves no checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.core.checkpoints import MANIFEST, step_folder, whole_checkpoints
from services.core.errors import DataError, WaitTimeoutError
from services.core.files import sha256_of

STATE_FILE = "state.safetensors"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is to be written: tensors that do not change any more, and plain values for the manifest."""

    number: int
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointKind:
    """For messages: whose checkpoints these are, and the setting that says where they go."""

    name: str
    setting: str


class CheckpointWriter:
    """Writes snapshots into `folder`; the newest `keep` of them stay, all of them with None. `owner` tells writers of
    one folder apart: an old one's write may still be under way."""

    def __init__(self, folder: Path, kind: CheckpointKind, owner: str, keep: int | None) -> None:
        assert keep is None or keep > 0
        self._folder, self._kind, self._keep = folder, kind, keep
        self._partial = folder / f".partial-{owner}"
        self._changed = threading.Condition()
        self._waiting: Snapshot | None = None
        self._busy = False
        self._failure: OSError | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Returns at once. One that comes while another still waits takes its place. Raises DataError when an earlier
        one could not be written."""
        self._raise_failure()
        with self._changed:
            self._waiting = snapshot
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._run, name=f"{self._kind.name}-checkpoint", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """Returns when everything saved is on the disk. Raises WaitTimeoutError, and DataError as `save` does."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy, timeout_s):
                raise WaitTimeoutError(
                    f"the {self._kind.name} checkpoint in {self._folder} was not written in {timeout_s:.0f} s"
                )
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise DataError(
                f"a {self._kind.name} checkpoint could not be written to {self._folder}: {self._failure}; make room or "
                f"set another {self._kind.setting}"
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                snapshot, self._waiting = self._waiting, None
                if snapshot is None or self._failure is not None:
                    self._busy = False
                    self._changed.notify_all()
                    return
            try:
                self._write(snapshot)
            except OSError as error:  # told by the next call
                self._failure = error

    def _write(self, snapshot: Snapshot) -> None:
        place = step_folder(self._folder, snapshot.number)
        if place.exists():
            return  # another writer was first, or it was written before
        shutil.rmtree(self._partial, ignore_errors=True)  # of a writer that was killed
        self._partial.mkdir(parents=True)
        file = self._partial / STATE_FILE
        save_file(dict(snapshot.tensors), file)
        _sync(file)
        manifest = {**snapshot.about, "bytes": file.stat().st_size, "sha256": sha256_of(file)}
        (self._partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _sync(self._partial / MANIFEST)
        self._move_to(place)
        _sync(self._folder)
        if self._keep is not None:
            for old in whole_checkpoints(self._folder)[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)

    def _move_to(self, place: Path) -> None:
        try:
            os.replace(self._partial, place)
        except OSError:
            if not place.is_dir():
                raise
            shutil.rmtree(self._partial)  # another writer was first with this one


def read_manifest(place: Path, kind: CheckpointKind) -> dict[str, Any]:
    """What the checkpoint in `place` says about itself. Raises DataError when it is damaged."""
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(place, kind, error) from None
    if not isinstance(manifest, dict):
        raise damaged(place, kind, TypeError(f"{MANIFEST} holds no JSON object"))
    return manifest


def read_state(
    place: Path, manifest: Mapping[str, Any], kind: CheckpointKind, prefixes: tuple[str, ...] = ("",)
) -> dict[str, Tensor]:
    """The tensors of the checkpoint in `place` whose names begin with one of `prefixes`, on the CPU, when they are
    exactly what was written. Raises DataError."""
    file = place / STATE_FILE
    try:
        if file.stat().st_size != manifest["bytes"] or sha256_of(file) != manifest["sha256"]:
            raise DataError(
                f"{kind.name} checkpoint {place}: {STATE_FILE} is not what was written: remove the folder to go on "
                "from the checkpoint before"
            )
        with safe_open(file, framework="pt") as state:
            return {name: state.get_tensor(name) for name in state.keys() if name.startswith(prefixes)}  # noqa: SIM118
    except (OSError, KeyError, SafetensorError) as error:
        raise damaged(place, kind, error) from None


def damaged(place: Path, kind: CheckpointKind, error: Exception) -> DataError:
    return DataError(
        f"{kind.name} checkpoint {place} is damaged ({type(error).__name__}: {error}): remove its folder to go on from "
        "the one before"
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
