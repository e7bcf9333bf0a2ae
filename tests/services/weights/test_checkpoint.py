"""Checkpoint folders: whole or not at all, and exactly what was written. (How a busy writer behaves is tested with the
drafter's checkpoints.)"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from services.core.checkpoints import step_of, whole_checkpoints
from services.core.errors import DataError
from services.weights.checkpoint import (
    STATE_FILE,
    CheckpointKind,
    CheckpointWriter,
    Snapshot,
    read_manifest,
    read_state,
)

KIND = CheckpointKind("run", "run.dir")


def snapshot(number: int) -> Snapshot:
    odd = torch.tensor([1e-42, float("inf"), -0.0])  # a denormal, an infinity, a negative zero: bits, not values
    return Snapshot(number, {"a": torch.full((2, 3), float(number)), "b/c": odd}, {"format": 1, "who": "me"})


def write(folder: Path, *numbers: int, keep: int | None = None) -> None:
    writer = CheckpointWriter(folder, KIND, "test", keep)
    for number in numbers:
        writer.save(snapshot(number))
        writer.wait(120)


def test_what_was_written_comes_back_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path, 7)
    (place,) = whole_checkpoints(tmp_path)
    manifest = read_manifest(place, KIND)
    assert (manifest["who"], step_of(place)) == ("me", 7)
    found, wanted = read_state(place, manifest, KIND), snapshot(7).tensors
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n].view(torch.int32), wanted[n].view(torch.int32)) for n in wanted)


def test_without_a_limit_all_stay(tmp_path: Path) -> None:
    write(tmp_path, 3, 1, 12)
    assert [step_of(p) for p in whole_checkpoints(tmp_path)] == [1, 3, 12]
    write(tmp_path, 13, keep=2)
    assert [step_of(p) for p in whole_checkpoints(tmp_path)] == [12, 13]


def test_nothing_but_whole_checkpoints_counts(tmp_path: Path) -> None:
    (tmp_path / ".partial-test").mkdir()
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-0000000005").write_text("a file")
    assert whole_checkpoints(tmp_path) == whole_checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "no state", "no manifest", "list"])
def test_damage_is_told_with_the_place_and_the_remedy(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 4)
    (place,) = whole_checkpoints(tmp_path)
    file = place / STATE_FILE
    data = bytearray(file.read_bytes())
    if damage == "cut":
        os.truncate(file, len(data) - 1)
    elif damage == "flipped":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "no state":
        file.unlink()
    elif damage == "no manifest":
        (place / "manifest.json").unlink()
    else:
        (place / "manifest.json").write_text("[1]")
    with pytest.raises(DataError, match=r"run checkpoint .*step-0000000004.*to go on from the (one|checkpoint) before"):
        read_state(place, read_manifest(place, KIND), KIND)
