"""Grown models compute what they were grown from: targets against transformers, drafters by their own networks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.config.drafter import DrafterConfig
from services.core.errors import ConfigError, DataError
from services.drafter.export import write_drafter_folder
from services.drafter.state import read_drafter
from services.models import grow_files
from services.models.capture import target_states
from services.models.drafter import Drafter, DrafterMethod
from services.models.files import read_config, read_grown, read_tensors
from services.models.grow import GrownShape, Growth, grow_tensor, new_layer_tensor
from services.models.grow_files import GrowOptions, grow_drafter, grow_target, grown_config
from services.models.kv import KVStore
from services.models.layers import RopeTable, model_spec
from services.models.methods import drafter_method
from services.models.target import target_names
from tests.services.models.tiny import CPU, FAMILIES, causal_mask, in_float64, spec_of, tensors_of, tiny_model

torch.set_num_threads(1)
VOCAB = 24
SHAPE = GrownShape(hidden_size=80, intermediate_size=112, num_layers=4, num_heads=8, num_kv_heads=4)


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ids_of(rows: int = 2, length: int = 23) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(5))


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest of the expected numbers `b`."""
    return float((a - b).abs().max() / b.abs().max())


def grow_in_memory(model: PreTrainedModel, growth: Growth) -> PreTrainedModel:
    """As `grow_target` does it, without files."""
    own = tensors_of(model)
    weights = {
        name: grow_tensor(name, own[name], growth) if name in own else new_layer_tensor(name, size, model.dtype, growth)
        for name, size in target_names(growth.spec).items()
    }
    config = type(model.config)(**grown_config(model.config.to_dict(), growth))
    grown = AutoModelForCausalLM.from_config(config).to(model.dtype)
    found = grown.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight"}
    grown.tie_weights()
    return grown


@st.composite
def shapes(draw: st.DrawFn) -> tuple[dict[str, int], GrownShape]:
    """A source shape and one that it can grow to; every ratio of the two, one included."""
    run, kv = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    source = {
        "hidden_size": draw(st.integers(1, 6)) * 2 * run * kv, "intermediate_size": draw(st.integers(3, 40)),
        "num_hidden_layers": draw(st.integers(1, 3)), "num_attention_heads": run * kv, "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([2, 8])),
    }  # fmt: skip
    grown_kv = kv + draw(st.integers(0, 3))
    heads = (run + draw(st.integers(0, 2))) * grown_kv
    return source, GrownShape(
        (-(-source["hidden_size"] // heads) + draw(st.integers(0, 9))) * heads,  # Llama configs want a multiple
        source["intermediate_size"] + draw(st.integers(0, 30)),
        source["num_hidden_layers"] + draw(st.integers(0, 2)),
        heads,
        grown_kv,
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shapes(), st.sampled_from(FAMILIES), st.booleans(), st.booleans(), st.sampled_from([1e-6, 1e-2]), st.integers(0, 99)
)
def test_logits_are_equal_whatever_the_shape(
    shape: tuple[dict[str, int], GrownShape], kind: str, tied: bool, noise: bool, eps: float, seed: int
) -> None:
    """In float64, where rounding explains nothing that can be seen: in float32 a shape whose logits nearly cancel is up
    to 5e-5 off. A large eps shows an eps that was scaled wrongly: Qwen3 has one for the stream and for each head."""
    extra = {"attention_bias": seed % 2 == 0} if kind != "qwen2" else {}
    model = tiny_model.__wrapped__(kind, VOCAB, seed, tie_word_embeddings=tied, rms_norm_eps=eps, **shape[0], **extra)
    growth = Growth(spec_of(model), shape[1], noise)
    model = in_float64(model)
    grown = in_float64(grow_in_memory(model, growth))
    with torch.no_grad():
        assert distance(grown(input_ids=ids_of()).logits, model(input_ids=ids_of()).logits) < 1e-11


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_grown_folder_is_a_model_folder(tmp_path: Path, kind: str, tied: bool) -> None:
    model = tiny_model(kind, VOCAB, tie_word_embeddings=tied)
    source = save(model, tmp_path / "small")
    grown = grow_target(source, tmp_path / "large", GrowOptions(SHAPE))
    large = load(tmp_path / "large")
    assert model_spec(read_config(tmp_path / "large")) == Growth(spec_of(model), SHAPE).spec
    assert grown.parameters == sum(p.numel() for p in large.parameters())
    assert grown.source_parameters == sum(p.numel() for p in model.parameters())
    assert (tmp_path / "large/tokenizer.json").read_text() == "{}"
    told = read_grown(tmp_path / "large")
    assert told is not None and told["grown_from"] == str(source) and told["new_weights"] == "zeros"
    assert read_grown(source) is None
    with torch.no_grad():
        assert distance(large(input_ids=ids_of()).logits, model(input_ids=ids_of()).logits) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bfloat16_is_exact_at_four_times_the_width(tmp_path: Path, kind: str) -> None:
    """Every weight comes out as it went in, or halved: no rounding at all."""
    source = save(tiny_model.__wrapped__(kind, VOCAB).bfloat16(), tmp_path / "small")
    small = read_tensors(source)
    shape = dataclasses.replace(SHAPE, hidden_size=128)
    grow_target(source, tmp_path / "large", GrowOptions(shape))
    large = read_tensors(tmp_path / "large")
    assert {t.dtype for t in large.values()} == {torch.bfloat16} and read_grown(tmp_path / "large")["bfloat16_exact"]
    name = "model.layers.1.post_attention_layernorm.weight"
    assert torch.equal(large[name][:32] * 2, small[name])
    with torch.no_grad():
        got, expected = (load(f)(input_ids=ids_of()).logits for f in (tmp_path / "large", source))
    assert distance(got, expected) < 1e-5


def test_a_shape_that_rounds_in_bfloat16_says_so(tmp_path: Path) -> None:
    source = save(tiny_model("llama", VOCAB), tmp_path / "small")
    grow_target(source, tmp_path / "large", GrowOptions(SHAPE, "bfloat16"))
    assert read_grown(tmp_path / "large")["bfloat16_exact"] is False
    assert read_config(tmp_path / "large")["dtype"] == "bfloat16"
    assert {t.dtype for t in read_tensors(tmp_path / "large").values()} == {torch.bfloat16}


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grow_files, "SHARD_BYTES", 40_000)
    model = tiny_model("qwen2", VOCAB)
    grown = grow_target(save(model, tmp_path / "small"), tmp_path / "large", GrowOptions(SHAPE))
    files = list((tmp_path / "large").glob("model-*.safetensors"))
    assert grown.files == len(files) > 3
    index = json.loads((tmp_path / "large/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == target_names(Growth(spec_of(model), SHAPE).spec).keys()
    with torch.no_grad():
        assert distance(load(tmp_path / "large")(input_ids=ids_of()).logits, model(input_ids=ids_of()).logits) < 1e-5


def test_noise_fills_what_nothing_reads(tmp_path: Path) -> None:
    model = tiny_model("qwen3", VOCAB)
    grow_target(save(model, tmp_path / "small"), tmp_path / "large", GrowOptions(SHAPE, noise=True))
    large = read_tensors(tmp_path / "large")
    for name in ("model.layers.3.mlp.gate_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert (large[name] == 0).float().mean() < 0.1
    assert not large["model.layers.3.mlp.down_proj.weight"].any()
    with torch.no_grad():
        assert distance(load(tmp_path / "large")(input_ids=ids_of()).logits, model(input_ids=ids_of()).logits) < 1e-5


def test_training_leaves_the_padding_alone() -> None:
    """With the source's heads per key/value head, no gradient reaches what was added."""
    model = tiny_model("llama", VOCAB)
    growth = Growth(spec_of(model), dataclasses.replace(SHAPE, num_heads=8, num_kv_heads=4))
    grown, own = grow_in_memory(model, growth).train(), tensors_of(model)
    grown(input_ids=ids_of(), labels=ids_of()).loss.backward()
    ones = {name: torch.ones_like(t) for name, t in own.items()}
    for name, p in grown.named_parameters():
        assert p.grad is not None
        kept = grow_tensor(name, ones[name], growth) != 0 if name in own else torch.zeros_like(p, dtype=torch.bool)
        assert not p.grad[~kept].any(), name
        assert name not in own or p.grad[kept].any(), name


# -- drafters


def predict(method: DrafterMethod, tensors: dict[str, Tensor], embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Two depths, the second fed with the first."""
    length, spec = embeds.shape[1], method.spec
    at = torch.arange(length)[None]
    rope = RopeTable(spec, length, CPU, torch.float32).at(at)
    network = method.network(tensors)
    hidden, out = network.enter(states), []
    for _ in range(2):
        kv = KVStore(spec, 1, 1, length, CPU, torch.float32)
        step = network.step(embeds, hidden, rope, kv.attend(0, at, causal_mask(0, length)))
        hidden = step.hidden
        out.append(step.predicted)
    return out[0], out[1]


def make_drafter(method: DrafterMethod, target_folder: Path, folder: Path) -> dict[str, Tensor]:
    drafter = Drafter(method)
    drafter.reset(torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(2)
    tensors = {n: p.detach() + 0.2 * torch.randn(p.shape, generator=g) for n, p in drafter.tensors().items()}
    write_drafter_folder(tensors, method, read_config(target_folder), folder)
    return tensors


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@pytest.mark.parametrize("noise", [False, True])
def test_a_grown_drafter_predicts_the_same(tmp_path: Path, kind: str, name: str, noise: bool) -> None:
    """From the states of the grown target, at two draft depths, in the logits of the grown head."""
    model = tiny_model(kind, VOCAB, num_hidden_layers=5)
    source = save(model, tmp_path / "small")
    method = drafter_method(DrafterConfig(method=name), spec_of(model))
    own = make_drafter(method, source, tmp_path / "drafter")
    options = GrowOptions(dataclasses.replace(SHAPE, num_layers=7), noise=noise)
    grow_target(source, tmp_path / "large", options)
    grow_drafter(tmp_path / "drafter", tmp_path / "large/drafter", source, options)

    large = load(tmp_path / "large")
    chosen = {"aux_layers": method.aux_layers} if name == "eagle3" else {}
    grown_method = drafter_method(DrafterConfig(method=name, **chosen), spec_of(large))
    grown = read_drafter(tmp_path / "large/drafter", grown_method)
    logits = []
    for target, how, tensors in ((model, method, own), (large, grown_method, grown)):
        with torch.no_grad():
            last, aux = target_states(target.base_model, how.aux_layers, input_ids=ids_of(1))
            embeds = target.get_input_embeddings()(ids_of(1).roll(-1, 1))
            predicted = predict(how, tensors, embeds, last if aux is None else aux)
            logits.append([target.lm_head(p) for p in predicted])
    for got, expected in zip(logits[1], logits[0], strict=True):
        assert distance(got, expected) < 1e-5


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    source = save(tiny_model("llama", VOCAB), tmp_path / "small")
    other = save(tiny_model("llama", VOCAB, intermediate_size=64), tmp_path / "other")
    make_drafter(drafter_method(DrafterConfig(), model_spec(read_config(other))), other, tmp_path / "drafter")
    with pytest.raises(DataError, match="intermediate_size 64, the target 48"):
        grow_drafter(tmp_path / "drafter", tmp_path / "out", source, GrowOptions(SHAPE))
    assert not (tmp_path / "out").exists()


# -- refusals


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": 31}, "hidden_size 31 is below the source's 32, and growing only adds: give at least 32"),
        ({"num_layers": 1}, "num_layers 1 is below"),
        ({"num_heads": 10}, "num_heads 10 is no multiple of num_kv_heads 4"),
        ({"num_heads": 4, "num_kv_heads": 4}, "num_heads of at least 8, or num_kv_heads of at most 2"),
        ({"hidden_size": 84}, "hidden_size 84 of a Llama must be a multiple of num_heads 8"),
        ({"num_kv_heads": 0}, "num_kv_heads 0 is below"),
    ],
)
def test_impossible_shapes_name_the_remedy(tmp_path: Path, change: dict[str, int], told: str) -> None:
    source = save(tiny_model("llama", VOCAB), tmp_path / "small")
    with pytest.raises(ConfigError, match=told):
        grow_target(source, tmp_path / "large", GrowOptions(dataclasses.replace(SHAPE, **change)))
    assert not (tmp_path / "large").exists()


def test_a_model_is_never_overwritten(tmp_path: Path) -> None:
    source = save(tiny_model("llama", VOCAB), tmp_path / "small")
    with pytest.raises(ConfigError, match="name another folder"):
        grow_target(source, source, GrowOptions(SHAPE))


def test_a_source_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    source = save(tiny_model("llama", VOCAB), tmp_path / "small")
    config = read_config(source)
    for key, value in (("num_hidden_layers", 3), ("vocab_size", VOCAB + 1), ("model_type", "qwen3")):
        (source / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(DataError, match="give a whole checkpoint"):
            grow_target(source, tmp_path / "large", GrowOptions(dataclasses.replace(SHAPE, num_layers=4)))
        assert not (tmp_path / "large").exists()


def test_tensors_of_other_networks_are_refused() -> None:
    growth = Growth(spec_of(tiny_model("llama", VOCAB)), SHAPE)
    with pytest.raises(DataError, match="belongs to no Llama"):
        grow_tensor("d2t", torch.zeros(VOCAB), growth)
    with pytest.raises(DataError, match="does not fit"):
        grow_tensor("fc.weight", torch.zeros(32, 65), growth)
