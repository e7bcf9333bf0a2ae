"""Out in every layout and in again; and what must be refused, with nothing read."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.core.errors import DataError, WeightError
from services.drafter.card import Measured, Origin
from services.drafter.export import write_export
from services.drafter.layouts import LAYOUTS, Layout, Verifier
from services.drafter.published import read_published
from services.models.files import read_config
from services.models.target import EMBED, HEAD
from tests.services.drafter.drafters import Shape, shapes

ORIGIN = Origin("runs/one", "base", 3, 2, "abc", 17)
SMALL = Shape("llama", "eagle3", 2, 1, 4, 5, 11, False, torch.float32, (0, 3, 4, 9))
KINDS = {
    "eagle": replace(SMALL, method="eagle", draft_ids=None),
    "eagle3": replace(SMALL, draft_ids=None),
    "eagle3, own head": SMALL,
}
CASES = [(layout, kind) for layout in LAYOUTS for kind in KINDS]


def export(shape: Shape, layout: Layout, folder: Path, measured: Measured | None = None) -> Path:
    verifier = Verifier(shape.config, "some/target")
    write_export(shape.tensors(), shape.drafter(), layout, verifier, ORIGIN, measured, folder)
    return folder


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(read_config(folder) | fields))


def change_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.sampled_from(LAYOUTS))
def test_out_and_in_again_is_the_same_drafter(shape: Shape, layout: Layout) -> None:
    with tempfile.TemporaryDirectory() as place:
        target = shape.write_target(Path(place) / "target")
        read = read_published(export(shape, layout, Path(place) / "out"), target)
    assert read.layout == layout and read.method == shape.drafter(), "aux layers and draft tokens among it"
    tensors = shape.tensors()
    assert read.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read.tensors[name].dtype == shape.dtype and torch.equal(read.tensors[name], tensor), name


@settings(max_examples=25, deadline=None)
@given(shapes(), st.sampled_from(LAYOUTS), st.data())
def test_a_truncated_file_is_refused(shape: Shape, layout: Layout, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        target = shape.write_target(Path(place) / "target")
        folder = export(shape, layout, Path(place) / "out")
        file = folder / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(DataError, match="damaged or truncated"):
            read_published(folder, target)


@pytest.mark.parametrize(("layout", "kind"), CASES)
@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"heads": 4}, "hidden_size"),
        ({"vocab": 12}, "vocab_size"),
        ({"kv_heads": 2}, "num_key_value_heads"),
        ({"heads": 4, "head_dim": 2}, "num_attention_heads"),
        ({"layers": 4}, "eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_a_drafter_of_another_target_is_refused_by_the_key(
    tmp_path: Path, layout: Layout, kind: str, changed: dict[str, Any], key: str
) -> None:
    other = replace(KINDS[kind], **changed)
    folder = export(KINDS[kind], layout, tmp_path / "out")
    target = other.write_target(tmp_path / "target")
    if key == "eagle_aux_hidden_state_layer_ids" and kind == "eagle":
        assert read_published(folder, target).method.aux_layers == (), "it reads the last hidden state of any depth"
        return
    with pytest.raises(DataError, match=rf"{key} \S+"):
        read_published(folder, target)


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_row_25_wrong_architectures_are_refused(tmp_path: Path, layout: Layout, kind: str) -> None:
    """Under the wrong class an engine drafts nonsense, and says nothing."""
    folder = export(KINDS[kind], layout, tmp_path / "out")
    target = KINDS[kind].write_target(tmp_path / "target")
    made, other = ("eagle", "eagle3") if kind == "eagle" else ("eagle3", "eagle")
    classes = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}
    wrong: dict[str, Any] = {"speculators_model_type": other} if layout == "speculators" else {}
    change(folder, **(wrong or {"architectures": [classes[other]]}))
    size = 8 * {"eagle": 2, "eagle3": 3}[made]
    with pytest.raises(DataError, match=rf"says {other}, but fc.weight is \[8, {size}\]"):
        read_published(folder, target)
    unknown = {"speculators_model_type": "medusa"} if layout == "speculators" else {"architectures": ["BertModel"]}
    change(folder, **unknown)
    with pytest.raises(DataError, match=r"architectures|speculators_model_type"):
        read_published(folder, target)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"norm_before_residual": True}, "norm_before_residual True"),
        ({"norm_output": True}, "norm_output True"),
        ({"fc_norm": True}, "fc_norm True"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"target_hidden_size": 64}, "target_hidden_size 64"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps 0.001"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, "rope_parameters .*1000000"),
        ({"draft_vocab_size": 5}, "draft_vocab_size 5"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}}, r"layer_ids \[2, 1, 3\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}}, r"layers \[0, 1, 4\]"),
    ],
)
def test_a_drafter_that_computes_something_else_is_refused(tmp_path: Path, fields: dict[str, Any], key: str) -> None:
    folder, target = export(SMALL, "sglang", tmp_path / "out"), SMALL.write_target(tmp_path / "target")
    change(folder, **fields)
    with pytest.raises(DataError, match=key):
        read_published(folder, target)


def test_aux_layers_are_counted_as_each_engine_counts(tmp_path: Path) -> None:
    """SGLang's id k is the output of layer k; vLLM's is its input."""
    shape = KINDS["eagle3"]
    configs = {layout: read_config(export(shape, layout, tmp_path / layout)) for layout in LAYOUTS}
    key = "eagle_aux_hidden_state_layer_ids"
    assert configs["sglang"]["eagle_config"][key] == [0, 1, 3]
    assert configs["speculators"][key] == configs["hf"][key] == [1, 2, 4]
    deep = replace(shape, layers=16)
    target = deep.write_target(tmp_path / "target")
    change(tmp_path / "sglang", eagle_config=None)
    assert read_published(tmp_path / "sglang", target).method.aux_layers == (1, 7, 12), "what engines take unasked"


# What the loaders of SGLang 0.5.17's classes look for, by name and shape: H 8, I 12, heads 2 x 4, one of them for keys
# and values. Whatever is missing from a file keeps random numbers there.
SGLANG_LAYER = {
    "layers.0.self_attn.o_proj.weight": (8, 8), "layers.0.post_attention_layernorm.weight": (8,),
    "layers.0.mlp.gate_proj.weight": (12, 8), "layers.0.mlp.up_proj.weight": (12, 8),
    "layers.0.mlp.down_proj.weight": (8, 12),
}  # fmt: skip


def qkv(width: int) -> dict[str, tuple[int, ...]]:
    return {f"layers.0.self_attn.{x}_proj.weight": (rows, width) for x, rows in (("q", 8), ("k", 4), ("v", 4))}


SGLANG_FILES: dict[str, dict[str, tuple[int, ...]]] = {
    "eagle": SGLANG_LAYER | qkv(8) | {"fc.weight": (8, 16), "fc.bias": (8,)},
    "eagle3": SGLANG_LAYER | qkv(16) | {
        "fc.weight": (8, 24), "norm.weight": (8,), "layers.0.input_layernorm.weight": (8,),
        "layers.0.hidden_norm.weight": (8,),
    },
}  # fmt: skip
SGLANG_FILES["eagle3, own head"] = SGLANG_FILES["eagle3"] | {"lm_head.weight": (4, 8), "d2t": (4,), "t2d": (11,)}


@pytest.mark.parametrize("kind", KINDS)
def test_sglang_finds_every_tensor_it_looks_for(tmp_path: Path, kind: str) -> None:
    folder = export(KINDS[kind], "sglang", tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SGLANG_FILES[kind]
    config = read_config(folder)
    if kind == "eagle":
        assert config["architectures"] == ["LlamaForCausalLMEagle"] and not tensors["fc.bias"].any()
        return
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["target_hidden_size"] == 8
    own = KINDS[kind].draft_ids
    assert config["draft_vocab_size"] == (None if own is None else 4)
    if own is not None:
        assert (tensors["d2t"] + torch.arange(4)).tolist() == list(own), "offsets"


def test_specforge_names_are_known(tmp_path: Path) -> None:
    """It calls the layer midlayer, and keeps the target's embedding in the file."""
    folder, target = export(SMALL, "sglang", tmp_path / "out"), SMALL.write_target(tmp_path / "target")
    embed = load_file(target / "w.safetensors")[EMBED].bfloat16()

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)
        tensors["embed_tokens.weight"] = embed

    change_tensors(folder, rename)
    read = read_published(folder, target)
    assert read.method == SMALL.drafter()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in SMALL.tensors().items())
    change_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": embed.flip(0).contiguous()}))
    with pytest.raises(DataError, match=r"embed_tokens.weight is not the target's"):
        read_published(folder, target)


def test_a_copied_head_is_the_targets_and_another_one_is_refused(tmp_path: Path) -> None:
    shape = KINDS["eagle"]
    folder, target = export(shape, "hf", tmp_path / "out"), shape.write_target(tmp_path / "target")
    head = load_file(target / "w.safetensors")[HEAD]
    change_tensors(folder, lambda tensors: tensors.update({HEAD: head}))
    assert HEAD not in read_published(folder, target).tensors
    change_tensors(folder, lambda tensors: tensors.update({HEAD: -head}))
    with pytest.raises(DataError, match=r"lm_head.weight is not the target's"):
        read_published(folder, target)


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_a_bias_of_fc_must_be_zero(tmp_path: Path, bias: float) -> None:
    shape = KINDS["eagle"]
    folder, target = export(shape, "speculators", tmp_path / "out"), shape.write_target(tmp_path / "target")
    size = shape.drafter().target.hidden_size
    change_tensors(folder, lambda tensors: tensors.update({"fusion_fc.bias": torch.full((size,), bias)}))
    if bias:
        with pytest.raises(DataError, match=r"fc.bias is not zero"):
            read_published(folder, target)
    else:
        assert "fc.bias" not in read_published(folder, target).tensors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_that_is_missing_or_too_many_is_named(tmp_path: Path, layout: Layout) -> None:
    folder, target = export(SMALL, layout, tmp_path / "out"), SMALL.write_target(tmp_path / "target")
    change_tensors(folder, lambda tensors: tensors.update(surplus=torch.zeros(1)))
    with pytest.raises(WeightError, match=r"out.*not wanted \['surplus'\]"):
        read_published(folder, target)
    change_tensors(folder, lambda tensors: [tensors.pop(n) for n in ("surplus", "norm.weight")])
    with pytest.raises(WeightError, match=r"missing \['norm.weight'\]"):
        read_published(folder, target)
    change_tensors(folder, lambda tensors: tensors.update({"norm.weight": torch.full((8,), torch.nan)}))
    with pytest.raises(WeightError, match=r"norm.weight holds NaN"):
        read_published(folder, target)


def test_the_card_tells_origin_figures_and_how_to_start(tmp_path: Path) -> None:
    from services.drafter.card import AcceptanceRow, SpeedRow

    rows = (AcceptanceRow(0.0, (0.9, 0.8), 2.62, "engine"), AcceptanceRow(1.0, (0.7,), 1.7, "offline"))
    speed = (SpeedRow(1, 3, 1.52, 3, 1.49), SpeedRow(32, 0, 1.0))
    measured = Measured(12, rows, speed, "a machine", "h100-7b")
    card = (export(SMALL, "sglang", tmp_path / "a", measured) / "README.md").read_text()
    for told in ("runs/one", "base", "version 3", "abc", "17 micro-steps", "over 4 tokens", "EAGLE3", "licence"):
        assert told in card, told
    assert "| 0 | 2.62 | 0.900 | 0.800 | engine |" in card and "| 1 | 1.70 | 0.700 | - | offline |" in card
    assert "| 1 | 3 | 1.52 | 1.49 (chain of 3) |" in card and "| 32 | no drafts | 1.00 | not timed |" in card
    assert "vllm serve" in (export(SMALL, "hf", tmp_path / "b") / "README.md").read_text()
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="the speculators library is not installed")
def test_the_speculators_library_reads_the_config(tmp_path: Path, kind: str) -> None:
    from speculators import SpeculatorModelConfig

    folder = export(KINDS[kind], "speculators", tmp_path / "out")
    if kind == "eagle":
        pytest.skip("speculators 0.9 no longer has EAGLE")
    read = SpeculatorModelConfig.from_pretrained(str(folder))
    assert read.eagle_aux_hidden_state_layer_ids == [1, 2, 4] and read.norm_before_residual is False
    assert read.speculators_config.verifier.name_or_path == "some/target"
