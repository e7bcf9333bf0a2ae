from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.models.eagle import Eagle
from services.models.kv import KVStore
from services.models.layers import RopeTable
from tests.services.models.tiny import CPU, FAMILIES, causal_mask, spec_of, tiny_model


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_layer_is_its_familys_own_without_the_input_norm(kind: str, tmp_path: Path) -> None:
    """Against the decoder layer that transformers builds from the exported config.json, its input norm replaced by
    identity, on the fused input."""
    model = tiny_model(kind)
    config = Eagle(spec_of(model)).folder_config(model.config.to_dict())
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(9)
    layer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).model.layers[0]
    layer.input_layernorm = torch.nn.Identity()
    g = torch.Generator().manual_seed(0)
    fc = torch.randn(32, 64, generator=g) * 0.2
    embeds, hidden = torch.randn(1, 11, 32, generator=g), torch.randn(1, 11, 32, generator=g)
    own = {f"layers.0.{k}": v for k, v in layer.state_dict().items()} | {"fc.weight": fc}
    fused = torch.cat([embeds, hidden], -1) @ fc.T
    mask = torch.full((11, 11), -torch.inf).triu(1)[None, None]
    positions = model.model.rotary_emb(fused, torch.arange(11)[None])
    expected = layer(fused, attention_mask=mask, position_embeddings=positions)

    spec, at = spec_of(model), torch.arange(11)[None]
    attend = KVStore(spec, 1, 1, 11, CPU, torch.float32).attend(0, at, causal_mask(0, 11))
    network = Eagle(spec).network(own)
    assert network.enter(hidden) is hidden
    out = network.step(embeds, hidden, RopeTable(spec, 11, CPU, torch.float32).at(at), attend)
    assert (out.predicted - expected).abs().max() < 1e-4
    assert out.hidden is out.predicted, "the next depth is fed what the LM head takes"


def test_it_reads_the_last_hidden_state() -> None:
    method = Eagle(spec_of(tiny_model("llama")))
    assert method.aux_layers == () and method.state_size == 32 and method.spec.num_layers == 1


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("llama", "LlamaForCausalLMEagle"), ("qwen2", "Qwen2ForCausalLMEagle"), ("qwen3", "LlamaForCausalLMEagle")],
)
def test_it_is_one_that_stock_engines_load(kind: str, wanted: str) -> None:
    method = Eagle(spec_of(tiny_model(kind)))
    assert method.architecture == wanted
    assert not any("q_norm" in name or "k_norm" in name for name in method.names())
