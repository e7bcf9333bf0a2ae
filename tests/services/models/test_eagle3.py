"""EAGLE-3's network against a plain transcription of its formulas with transformers' own Llama parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from services.core.errors import ConfigError
from services.models.eagle3 import Eagle3, pick_aux_layers
from services.models.kv import KVStore
from services.models.layers import RopeTable, model_spec
from tests.services.models.tiny import CPU, FAMILIES, causal_mask, random_drafter, spec_of, tiny_model

AUX = (0, 1, 3)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


class Written(nn.Module):
    """The formulas, once more: no fused weights, no shared layer code."""

    def __init__(self, config: LlamaConfig, target_hidden: int) -> None:
        super().__init__()
        h = config.hidden_size
        self.fc = nn.Linear(3 * target_hidden, h, bias=False)
        layer = nn.Module()
        layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm = (
            LlamaRMSNorm(h, config.rms_norm_eps) for _ in range(3)
        )
        layer.self_attn, layer.mlp = LlamaAttention(config, 0), LlamaMLP(config)
        for x in "qkv":
            old = getattr(layer.self_attn, f"{x}_proj")
            setattr(layer.self_attn, f"{x}_proj", nn.Linear(2 * h, old.out_features, bias=False))
        self.layers = nn.ModuleList([layer])
        self.norm = LlamaRMSNorm(h, config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """(what the next depth gets, what the LM head gets)"""
        layer, length = self.layers[0], embeds.shape[1]
        hidden = self.fc(states) if states.shape[-1] != embeds.shape[-1] else states
        x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)
        turns = self.rotary(x, torch.arange(length)[None])
        x = hidden + layer.self_attn(x, position_embeddings=turns, attention_mask=causal_mask(0, length))[0]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, self.norm(x)


@torch.no_grad()
@pytest.mark.parametrize("rope", [None, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_network_is_the_formulas(kind: str, rope: dict | None, tmp_path: Path) -> None:
    """Built from nothing but the exported config.json and the tensors of a version, as an engine would."""
    extra = {"rope_parameters": rope} if rope else {}
    model = tiny_model.__wrapped__(kind, num_hidden_layers=5, rms_norm_eps=1e-3, **extra)
    spec = spec_of(model)
    method = Eagle3(spec, AUX)
    tensors = random_drafter(spec, method=method)
    (tmp_path / "config.json").write_text(json.dumps(method.folder_config(model.config.to_dict())))
    config = AutoConfig.from_pretrained(tmp_path)
    config._attn_implementation = "eager"
    written = Written(config, config.target_hidden_size)
    assert written.load_state_dict(tensors).missing_keys == []

    g = torch.Generator().manual_seed(5)
    embeds = torch.randn(1, 11, 32, generator=g)
    at, network = torch.arange(11)[None], method.network(tensors)
    turns = RopeTable(method.spec, 11, CPU, torch.float32).at(at)
    for states in (torch.randn(1, 11, 96, generator=g), torch.randn(1, 11, 32, generator=g)):
        first = states.shape[-1] == 96
        attend = KVStore(method.spec, 1, 1, 11, CPU, torch.float32).attend(0, at, causal_mask(0, 11))
        out = network.step(embeds, network.enter(states) if first else states, turns, attend)
        for found, expected in zip(out, written(embeds, states), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_layer_is_llamas_whatever_the_target_is(kind: str) -> None:
    """SGLang's one EAGLE-3 class has no biases and no q and k norms, and its qkv reads two halves."""
    names = Eagle3(spec_of(tiny_model(kind)), AUX).names()
    assert not any("q_norm" in n or "k_norm" in n or n.endswith("bias") for n in names)
    assert names["fc.weight"] == (32, 96) and names["norm.weight"] == (32,)
    assert names["layers.0.self_attn.q_proj.weight"] == (32, 64)
    assert names["layers.0.self_attn.k_proj.weight"] == names["layers.0.self_attn.v_proj.weight"] == (16, 64)
    assert names["layers.0.self_attn.o_proj.weight"] == (32, 32)
    assert names["layers.0.input_layernorm.weight"] == names["layers.0.hidden_norm.weight"] == (32,)
    assert Eagle3(spec_of(tiny_model(kind)), AUX).engine_zeros() == {}


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_exported_config_is_what_engines_read(kind: str, tmp_path: Path) -> None:
    target = tiny_model(kind, num_hidden_layers=5).config.to_dict()
    method = Eagle3(model_spec(target), AUX)
    written = method.folder_config(target)
    assert written["draft_vocab_size"] is None and not list(method.config_problems(written))
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, LlamaConfig) and config.architectures == ["LlamaForCausalLMEagle3"]
    assert config.draft_vocab_size is None, "null: the target's LM head over the whole vocabulary"
    assert config.eagle_config == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    assert (config.num_hidden_layers, config.target_hidden_size, config.vocab_size) == (1, 32, target["vocab_size"])
    assert not config.tie_word_embeddings and not config.attention_bias and config.head_dim == method.spec.head_dim
    assert model_spec(written) == method.spec, "reading it back gives the drafter's own layer"


@given(st.integers(4, 200))
def test_default_aux_layers_are_three_an_engine_can_capture(num_layers: int) -> None:
    low, middle, high = pick_aux_layers((), num_layers)
    assert 0 <= low < middle < high <= num_layers - 2
    assert high >= num_layers // 2, "the highest one is a high one"


def test_default_aux_layers() -> None:
    found = {n: pick_aux_layers((), n) for n in (4, 5, 6, 7, 8, 12, 28, 32)}
    assert found == {
        4: (0, 1, 2), 5: (0, 1, 3), 6: (0, 2, 4), 7: (0, 2, 5), 8: (0, 3, 6),
        12: (1, 5, 8), 28: (1, 13, 24), 32: (1, 15, 28),
    }  # fmt: skip


def test_chosen_aux_layers_must_fit_the_target() -> None:
    assert pick_aux_layers((0, 2, 3), 5) == (0, 2, 3)
    with pytest.raises(ConfigError, match=r"aux_layers \[0, 2, 4\] do not fit a target of 5 layers.*from 0 to 3"):
        pick_aux_layers((0, 2, 4), 5)
    for num_layers in (1, 2, 3):
        with pytest.raises(ConfigError, match=rf"has {num_layers} layers: set drafter.method: eagle"):
            pick_aux_layers((), num_layers)
