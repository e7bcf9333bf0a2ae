from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from services.core.errors import ConfigError, DataError
from services.models.convert import convert_model
from services.models.files import read_config, read_tensors
from services.models.layers import model_spec
from services.models.target import TargetModel
from services.models.tokenizer import load_tokenizer
from tests.services.models.gguf_files import WORDS, write_gguf
from tests.services.models.tiny import CPU, FAMILIES, spec_of, tensors_of, tiny_model


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_becomes_the_model_it_was_made_of(tmp_path: Path, kind: str, tied: bool) -> None:
    model = tiny_model(kind, len(WORDS), tie_word_embeddings=tied)
    out = tmp_path / "deep" / "model"
    made = convert_model(write_gguf(tmp_path / "a.gguf", model), out)
    assert (made.model_type, made.tied, made.eos_token_ids, made.chat_template) == (kind, tied, (2,), True)
    tensors = read_tensors(out)
    assert made.parameters == sum(t.numel() for t in tensors.values())
    assert tensors.keys() == tensors_of(model).keys()
    assert all(torch.equal(t, tensors_of(model)[name]) for name, t in tensors.items())
    spec, expected = model_spec(read_config(out)), spec_of(model)
    assert spec.rope == expected.rope and spec.norm_eps == pytest.approx(expected.norm_eps)
    assert (spec.head_dim, spec.num_kv_heads) == (expected.head_dim, expected.num_kv_heads)
    TargetModel(spec, 16, CPU, torch.float32).load(tensors)
    assert "quantization_config" not in read_config(out)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    """transformers' own reading of the folder and the engine's give the same ids; the end of sequence is the file's."""
    out = tmp_path / "model"
    convert_model(write_gguf(tmp_path / "a.gguf", tiny_model("llama", len(WORDS)), eot=0), out)
    tokenizer, theirs = load_tokenizer(str(out)), AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token_ids == (2, 0) and theirs.eos_token == "<|im_end|>" and theirs.pad_token_id == 2
    assert tokenizer.unk_token_id is None  # bytes spell everything
    for text in ("\n\n42", " ab é 世界", "<|im_start|>user\nab<|im_end|>"):
        assert tokenizer.encode(text) == theirs(text)["input_ids"]
    assert tokenizer.decode(tokenizer.render("ab", chat_template=True)) == "[user]ab>"


def test_another_tokenizer_can_be_named(tmp_path: Path) -> None:
    model = tiny_model("llama", len(WORDS))
    convert_model(write_gguf(tmp_path / "a.gguf", model), tmp_path / "first")
    odd = write_gguf(tmp_path / "b.gguf", model, splitter="unheard-of")
    with pytest.raises(DataError, match="--tokenizer"):
        convert_model(odd, tmp_path / "second")
    convert_model(odd, tmp_path / "second", tokenizer=tmp_path / "first")
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("first", "second"))
    assert first == second


def test_a_folder_of_another_number_format_without_safetensors(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    model = tiny_model("qwen2", len(WORDS))
    convert_model(write_gguf(tmp_path / "a.gguf", model), source)
    torch.save(tensors_of(model), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    made = convert_model(source, out, "bfloat16")
    assert made.dtype == "bfloat16" and made.eos_token_ids == (2,)
    assert all(t.dtype == torch.bfloat16 for t in read_tensors(out).values())
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert load_tokenizer(str(out)).decode(load_tokenizer(str(out)).render("ab", chat_template=True)) == "[user]ab>"


def test_what_would_come_out_wrong_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", len(WORDS))
    scaled = write_gguf(tmp_path / "a.gguf", model, extra=[("rope_freqs.weight", np.ones(4, np.float32))])
    with pytest.raises(DataError, match="rope"):
        convert_model(scaled, tmp_path / "out")
    source = tmp_path / "source"
    convert_model(write_gguf(tmp_path / "b.gguf", model), source)
    shutil.copytree(source, tmp_path / "quantised")
    config = read_config(source) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="quantised"):
        convert_model(tmp_path / "quantised", tmp_path / "out")
    (source / "config.json").write_text(json.dumps(read_config(source) | {"num_hidden_layers": 3}))
    with pytest.raises(DataError, match="lacks weights"):  # transformers would have drawn them at random
        convert_model(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="another folder"):
        convert_model(write_gguf(tmp_path / "a.gguf", tiny_model("llama", len(WORDS))), out)
    assert [p.name for p in out.iterdir()] == ["mine.txt"]
