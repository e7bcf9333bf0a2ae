from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.core.errors import DataError, WeightError
from services.drafter.export import write_drafter_folder
from services.drafter.state import fresh_state, initial_drafter_state
from services.models.drafter import ARCHITECTURES, drafter_names
from services.models.files import read_config
from services.models.layers import model_spec


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen2", False), ("llama", False)])
def test_export_and_initial_state_round_trip(model_folder, make_config, make_drafter, kind, tied) -> None:
    folder = model_folder(kind, tied)
    spec = model_spec(read_config(folder))
    state = pickle.loads(pickle.dumps(initial_drafter_state(make_config(folder))))
    assert state["total_steps"] == state["updates"] == 0
    expected = make_drafter(spec).tensors()
    assert state["tensors"].keys() == drafter_names(spec).keys()
    assert all(torch.equal(state["tensors"][n], expected[n]) for n in expected)
    config = read_config(folder / "drafter")
    assert config["architectures"] == [ARCHITECTURES[kind]] and config["num_hidden_layers"] == 1
    assert config["model_type"] == kind and config["hidden_size"] == spec.hidden_size
    assert "layer_types" not in config
    assert "drafter" in (folder / "drafter" / "README.md").read_text()
    assert not list((folder / "drafter").glob("*.partial"))


def change_config(folder, **fields):
    file = folder / "drafter" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "needs \\['Qwen3ForCausalLMEagle'\\]"),
        ({"architectures": None}, "has architectures None"),
        ({"hidden_size": 64}, "hidden_size 64, the target has 32"),
        ({"vocab_size": 100}, "vocab_size 100, the target has 24"),
    ],
)
def test_a_drafter_of_another_target_is_named(model_folder, make_config, fields, message) -> None:
    folder = model_folder()
    change_config(folder, **fields)
    with pytest.raises(DataError, match=message):
        initial_drafter_state(make_config(folder))


def test_zero_matching_tensors_are_refused(model_folder, make_config) -> None:
    """Row 30: SGLang's and transformers' loaders skip unknown names and succeed with nothing loaded."""
    folder = model_folder()
    file = folder / "drafter" / "model.safetensors"
    save_file({f"midlayer.{n}": t for n, t in load_file(file).items()}, file)
    with pytest.raises(WeightError, match=r"0 of .* tensors match"):
        initial_drafter_state(make_config(folder))


def test_a_damaged_file_and_a_missing_folder_are_named(model_folder, make_config) -> None:
    folder = model_folder()
    file = folder / "drafter" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged or truncated"):
        initial_drafter_state(make_config(folder))
    for f in (folder / "drafter").iterdir():
        f.unlink()
    (folder / "drafter").rmdir()
    with pytest.raises(DataError, match=r"no drafter at .*longtail warmup"):
        initial_drafter_state(make_config(folder))


def test_export_refuses_foreign_tensors(model_folder, tmp_path, make_drafter) -> None:
    folder = model_folder()
    config = read_config(folder)
    tensors = dict(make_drafter(model_spec(config)).tensors())
    tensors["lm_head.weight"] = torch.zeros(24, 32)
    with pytest.raises(WeightError, match="lm_head"):
        write_drafter_folder(tensors, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fresh_state_copies(make_spec, make_drafter) -> None:
    drafter = make_drafter(make_spec())
    state = fresh_state(drafter.tensors(), make_spec())
    with torch.no_grad():
        drafter.fc().zero_()
    assert state["tensors"]["fc.weight"].abs().sum() > 0
