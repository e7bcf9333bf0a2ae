"""Checkpoints of the drafter trainer: whole or not at all, checked when read, and what a restarted run goes on from."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path

import pytest
import torch

from services.core.checkpoints import MANIFEST
from services.core.checkpoints import whole_checkpoints as checkpoints
from services.core.errors import DataError, WaitTimeoutError
from services.drafter.checkpoint import MOMENTS, checkpoint_writer, read_checkpoint, snapshot_of, starting_state
from services.drafter.service import build_drafter_service
from services.models.files import read_config
from services.models.layers import model_spec
from services.models.methods import drafter_method
from services.weights import checkpoint
from tests.services.drafter.test_service import chunk_of

STATE = checkpoint.STATE_FILE


@pytest.fixture
def setting(model_folder, make_config, make_states, tmp_path):
    """(config with a checkpoint folder, method, a service that has trained a little)."""
    config = make_config(model_folder(), checkpoint_dir=tmp_path / "kept")
    method = drafter_method(config.drafter, model_spec(read_config(Path(config.model.path))))
    service = build_drafter_service(config, 0)
    states = make_states((3, 9), (2, 20), (4, 2))
    service.begin(starting_state(config), 1)
    service.add_chunk(chunk_of(states), states)
    service.train(0.05, 1)
    return config, method, service


def same(a, b) -> bool:
    if a["total_steps"] != b["total_steps"] or a["updates"] != b["updates"]:
        return False
    pairs = [(a["tensors"], b["tensors"]), *((a["optimizer"][m], b["optimizer"][m]) for m in MOMENTS)]
    return all(x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in pairs)


def saved(config, method, state) -> Path:
    writer = checkpoint_writer(config.drafter.checkpoint_dir, "test")
    writer.save(snapshot_of(state, method))
    writer.wait(120)
    return checkpoints(config.drafter.checkpoint_dir)[-1]


def test_a_restarted_run_goes_on_from_the_last_snapshot(setting) -> None:
    config, _, service = setting
    total, state = service.snapshot(1)
    service.checkpoint(state)
    service._checkpoints.wait(120)
    assert total > 0 and same(starting_state(config), state)
    other = build_drafter_service(config, 1)
    other.begin(starting_state(config), 2)
    assert same(other.snapshot(2)[1], state), "the optimizer's moments and counts came along"


def test_a_fresh_state_has_no_moments_and_comes_back_so(setting, tmp_path) -> None:
    config, method, _ = setting
    fresh = starting_state(config)
    assert fresh["total_steps"] == 0 and read_checkpoint(tmp_path / "kept", method) is None
    saved(config, method, fresh)
    assert same(read_checkpoint(tmp_path / "kept", method), fresh)


def test_saving_does_not_wait_and_the_newest_waiting_state_wins(setting, monkeypatch) -> None:
    config, method, service = setting
    _, state = service.snapshot(1)
    service.checkpoint(state)
    service._checkpoints.wait(120)
    gate, begun = threading.Event(), threading.Event()
    real = checkpoint.save_file

    def slow(tensors, file):
        begun.set()
        assert gate.wait(120)
        real(tensors, file)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    writer = checkpoint_writer(config.drafter.checkpoint_dir, "test", keep=5)
    steps = state["total_steps"]
    for n in (1, 2, 3, 4):
        writer.save(snapshot_of({**state, "total_steps": steps + n}, method))
        assert begun.wait(120)
    with pytest.raises(WaitTimeoutError, match="was not written in 0 s"):
        writer.wait(0.05)
    gate.set()
    writer.wait(120)
    names = [int(p.name.removeprefix("step-")) - steps for p in checkpoints(config.drafter.checkpoint_dir)]
    assert names == [0, 1, 4]


def test_two_slots_may_write_the_same_step_at_once(setting, monkeypatch) -> None:
    config, method, service = setting
    state = service.snapshot(1)[1]
    service.checkpoint(state)
    service._checkpoints.wait(120)
    later, folder = {**state, "total_steps": state["total_steps"] + 1}, config.drafter.checkpoint_dir
    real = checkpoint.save_file

    def overtaken(tensors, file):
        monkeypatch.setattr(checkpoint, "save_file", real)
        other = checkpoint_writer(folder, "other")
        other.save(snapshot_of(later, method))
        other.wait(120)
        real(tensors, file)

    monkeypatch.setattr(checkpoint, "save_file", overtaken)
    saved(config, method, later)
    assert same(read_checkpoint(folder, method), later)
    assert sorted(p.name for p in folder.glob(".partial*")) == []


def test_only_the_newest_are_kept(setting) -> None:
    config, method, service = setting
    _, state = service.snapshot(1)
    for n in range(1, 5):
        saved(config, method, {**state, "total_steps": state["total_steps"] + n})
    kept = [
        int(p.name.removeprefix("step-")) - state["total_steps"] for p in checkpoints(config.drafter.checkpoint_dir)
    ]
    assert kept == [3, 4]


def test_a_writer_killed_in_the_middle_leaves_nothing_that_counts(setting) -> None:
    config, method, service = setting
    _, state = service.snapshot(1)
    service.checkpoint(state)
    service._checkpoints.wait(120)
    folder = config.drafter.checkpoint_dir
    half = folder / ".partial-test"
    half.mkdir()
    (half / STATE).write_bytes(b"half")
    assert same(read_checkpoint(folder, method), state)
    saved(config, method, {**state, "total_steps": state["total_steps"] + 1})
    assert not half.exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "manifest", "format", "other drafter"])
def test_a_damaged_or_foreign_checkpoint_is_told_and_not_skipped(setting, damage: str) -> None:
    config, method, service = setting
    place = saved(config, method, service.snapshot(1)[1])
    file, manifest = place / STATE, json.loads((place / MANIFEST).read_text())
    data = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "flipped":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "missing":
        file.unlink()
    elif damage == "manifest":
        (place / MANIFEST).write_text("{")
    else:
        changed = {"format": 99} if damage == "format" else {"hidden_size": 7}
        (place / MANIFEST).write_text(json.dumps(manifest | changed))
    remedy = "checkpoint_dir" if damage in ("format", "other drafter") else "before"
    with pytest.raises(DataError, match=f"step-.*{remedy}"):
        starting_state(config)


def test_a_folder_that_cannot_be_written_is_told_by_the_next_call(setting, tmp_path) -> None:
    _, method, service = setting
    _, state = service.snapshot(1)
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    writer = checkpoint_writer(blocked, "test")
    before = copy.deepcopy(state)
    writer.save(snapshot_of(state, method))
    with pytest.raises(DataError, match=r"could not be written.*make room or set another drafter\.checkpoint_dir"):
        writer.wait(120)
    with pytest.raises(DataError, match="could not be written"):
        writer.save(snapshot_of(state, method))
    assert same(state, before)
