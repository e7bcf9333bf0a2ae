from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.core.errors import ConfigError, DataError
from services.models.device import pick_device, pick_dtype
from services.models.files import drafter_dir, model_dir, read_config, read_tensors
from services.models.layers import model_spec
from services.models.rope import inverse_frequencies
from services.models.target import TargetModel
from tests.services.models.tiny import CPU, FAMILIES, spec_of, tensors_of, tiny_model


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_comes_back(tmp_path: Path, kind: str, tied: bool) -> None:
    model = tiny_model(kind, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    spec = model_spec(read_config(model_dir(str(tmp_path))))
    assert spec == spec_of(model) and spec.tied == tied
    TargetModel(spec, 16, CPU, torch.float32).load(read_tensors(tmp_path))
    assert all(torch.equal(v, tensors_of(model)[k]) for k, v in read_tensors(tmp_path).items())


def test_shards_are_joined(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    assert read_tensors(tmp_path).keys() == {"a", "b"}


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config.json is missing; give a Hugging Face model folder"):
        model_dir(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(DataError, match="JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="cannot read"):
        read_config(tmp_path)
    with pytest.raises(DataError, match="safetensors"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b'\x10\0\0\0\0\0\0\0{"a"')
    with pytest.raises(DataError, match="damaged or truncated"):
        read_tensors(tmp_path)


def test_the_drafter_lies_inside_or_beside(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    assert drafter_dir(str(target), "eagle") == tmp_path / "drafter"
    (target / "drafter").mkdir()
    assert drafter_dir(str(target), "eagle") == target / "drafter"
    (tmp_path / "drafter-eagle3").mkdir()
    assert drafter_dir(str(target), "eagle3") == tmp_path / "drafter-eagle3"
    assert drafter_dir(str(target), "eagle") == target / "drafter"


def test_unknown_rope_is_refused() -> None:
    with pytest.raises(DataError, match="'yarn' is not supported"):
        inverse_frequencies({"rope_type": "yarn", "rope_theta": 10000.0}, 8)


def test_device_and_dtype() -> None:
    assert pick_device("cpu").type == "cpu" and pick_dtype("bfloat16") is torch.bfloat16
    if not torch.cuda.is_available():
        assert pick_device("auto").type == "cpu"
        with pytest.raises(ConfigError, match="use auto or cpu"):
            pick_device("cuda")
