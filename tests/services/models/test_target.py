from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.core.errors import DataError, WeightError
from services.models import layers
from services.models.eagle import Eagle
from services.models.kv import KVStore
from services.models.layers import ModelSpec, decoding_layout, model_spec
from services.models.target import TargetModel, check_tensors, target_names
from tests.services.models.tiny import CPU, FAMILIES, SHAPE, causal_mask, spec_of, tensors_of, tiny_model, tiny_target

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
VARIANTS: list[tuple[str, dict]] = [
    *[(kind, {"tie_word_embeddings": tied}) for kind in FAMILIES for tied in (False, True)],
    *[(kind, {"rope_parameters": rope}) for kind in FAMILIES for rope in (LLAMA3, LINEAR)],
    *[(kind, {"num_key_value_heads": heads}) for kind in FAMILIES for heads in (1, 4)],
    ("llama", {"attention_bias": True}),
    ("llama", {"head_dim": 16}),
    ("qwen3", {"head_dim": 4}),
    ("qwen3", {"attention_bias": True, "rms_norm_eps": 1e-3}),
]


def forward_all(target: TargetModel, ids: Tensor, pieces: tuple[int, ...]) -> Tensor:
    """ids [B,T] through the key/value store in pieces -> logits [B,T,V]."""
    rows, length = ids.shape
    kv = KVStore(target.spec, target.spec.num_layers, rows, length + 4, CPU, torch.float32)
    out, start = [], 0
    for size in pieces:
        at = torch.arange(start, start + size).expand(rows, size)
        mask = causal_mask(start, size).expand(rows, -1, -1, -1)
        out.append(target.forward(ids[:, start : start + size], at, kv, at, mask))
        start += size
    assert start == length
    return target.logits(torch.cat(out, 1))


@pytest.mark.parametrize(("kind", "extra"), VARIANTS, ids=lambda v: str(v) if isinstance(v, str) else "-".join(v))
def test_forward_equals_transformers(kind: str, extra: dict) -> None:
    rope = extra.get("rope_parameters")
    model = tiny_model.__wrapped__(kind, 40, **extra)  # uncached: rope parameters are a dictionary
    ids = torch.randint(0, 40, (2, 90), generator=torch.Generator().manual_seed(3))
    expected = model(input_ids=ids).logits
    target = tiny_target(model)
    for pieces in ((90,), (1, 60, 1, 28)):
        assert (forward_all(target, ids, pieces) - expected).abs().max() < 1e-4
    if rope is not None:  # and the scaling does something that an unscaled model would be caught by
        plain = tiny_model(kind, 40)
        assert (plain(input_ids=ids).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_names_are_those_of_the_state_dict(kind: str, tied: bool) -> None:
    model = tiny_model(kind, tie_word_embeddings=tied)
    names = {k: tuple(v.shape) for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    assert target_names(spec_of(model)) == names


def test_tied_models_load_with_and_without_the_head() -> None:
    model = tiny_model("qwen3", tie_word_embeddings=True)
    tensors = tensors_of(model)
    embedding = tensors["model.embed_tokens.weight"]
    target = tiny_target(model)
    target.load(tensors | {"lm_head.weight": torch.zeros_like(embedding)})
    assert torch.equal(target.weights.embed, embedding) and torch.equal(target.weights.head, embedding)


def test_a_large_tied_head_is_the_embedding_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy of a real vocabulary would take as much memory as several layers."""
    monkeypatch.setattr(layers, "CACHED_ELEMENTS", 1)
    model = tiny_model("qwen3", tie_word_embeddings=True)
    target = tiny_target(model)
    target.load(tensors_of(model))
    assert target.weights.head is target.weights.embed


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_decoding_layout_is_the_same_matrix(rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns)
    found = decoding_layout(weight)
    assert torch.equal(found, weight) and found.t().is_contiguous()


def bad_loads(spec: ModelSpec, good: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    some = "model.layers.1.mlp.down_proj.weight"
    nan, infinite = good[some].clone(), good[some].clone()
    nan[0, 0], infinite[-1, -1] = torch.nan, torch.inf
    return {
        "nothing": {},
        "one missing": {k: v for k, v in good.items() if k != some},
        "all renamed": {f"module.{k}": v for k, v in good.items()},
        "one renamed": {k.replace("down_proj", "w2"): v for k, v in good.items()},
        "one more": good | {"model.layers.2.mlp.down_proj.weight": good[some]},
        "transposed": good | {some: good[some].T},
        "wider": good | {some: torch.zeros(good[some].shape[0], good[some].shape[1] + 1)},
        "flattened": good | {some: good[some].flatten()},
        "a drafter": {k: torch.zeros(shape) for k, shape in Eagle(spec).names().items()},
        "nan": good | {some: nan},
        "infinite": good | {some: infinite},
    }


BAD = list(bad_loads(spec_of(tiny_model("qwen3")), tensors_of(tiny_model("qwen3"))))


@pytest.mark.parametrize("what", BAD)
def test_bad_loads_are_refused_and_the_target_keeps_what_it_had(what: str) -> None:
    model = tiny_model("qwen3")
    target = tiny_target(model)
    before = target.weights
    bad = bad_loads(spec_of(model), tensors_of(tiny_model("qwen3", seed=1)))[what]
    with pytest.raises(WeightError, match="nothing changed"):
        target.load(bad)
    assert target.weights is before
    ids = torch.arange(20)[None]
    assert (forward_all(target, ids, (20,)) - model(input_ids=ids).logits).abs().max() < 1e-4


def test_another_model_of_the_same_family_is_refused() -> None:
    """Row 30: a larger model pushed into a small engine."""
    target = tiny_target(tiny_model("llama"))
    with pytest.raises(WeightError, match="expected"):
        target.load(tensors_of(tiny_model("llama", hidden_size=64)))
    with pytest.raises(WeightError, match="not wanted"):
        target.load(tensors_of(tiny_model("llama", num_hidden_layers=3)))


def test_a_refused_load_says_how_many_matched() -> None:
    names = target_names(spec_of(tiny_model("llama")))
    with pytest.raises(WeightError, match=rf"0 of {len(names)} tensors match"):
        check_tensors({"x": torch.zeros(1)}, names, "policy")


def test_loaded_weights_are_copies() -> None:
    """In one process the trainer writes on into what it published."""
    model = tiny_model("llama")
    given = {k: v.clone() for k, v in tensors_of(model).items()}
    target = tiny_target(model, load=False)
    target.load(given)
    for t in given.values():
        t.fill_(7.0)
    ids = torch.arange(12)[None]
    assert (forward_all(target, ids, (12,)) - model(input_ids=ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"model_type": None},
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"use_sliding_window": True},
    ],
)
def test_unsupported_models_are_named(change: dict) -> None:
    with pytest.raises(DataError, match="not supported"):
        model_spec(SHAPE | {"model_type": "llama", "vocab_size": 8} | change)


def test_older_configs_are_read() -> None:
    """Files written before transformers 5: rope_theta and rope_scaling at the top, no head_dim, no kv heads."""
    old = {
        "model_type": "llama", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "rope_theta": 123.0, "rope_scaling": {"type": "linear", "factor": 2.0},
    }  # fmt: skip
    spec = model_spec(old)
    assert (spec.num_kv_heads, spec.head_dim, spec.tied) == (4, 8, False)
    assert dict(spec.rope) | {"type": None} == {"rope_type": "linear", "type": None, "factor": 2.0, "rope_theta": 123.0}
