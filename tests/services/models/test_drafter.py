from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.core.errors import WeightError
from services.models.drafter import EagleDrafter, draft_forward, drafter_names, drafter_spec, fuse_drafter
from services.models.kv import KVStore
from services.models.layers import RopeTable
from services.models.target import check_tensors
from tests.services.models.tiny import CPU, FAMILIES, causal_mask, random_drafter, spec_of, tensors_of, tiny_model


def run(tensors: dict[str, Tensor], model, embeds: Tensor, hidden: Tensor) -> Tensor:
    spec, length = spec_of(model), embeds.shape[1]
    at = torch.arange(length)[None]
    kv = KVStore(spec, 1, 1, length, CPU, torch.float32)
    attend = kv.attend(0, at, causal_mask(0, length))
    rope = RopeTable(spec, length, CPU, torch.float32).at(at)
    layer = fuse_drafter(tensors, spec)
    return draft_forward(tensors["fc.weight"], layer, drafter_spec(spec), embeds, hidden, rope, attend)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_layer_is_the_targets_own_without_its_input_norm(kind: str) -> None:
    """Against transformers' decoder layer, its input norm replaced by identity, on the fused input."""
    model = tiny_model(kind)
    layer = tiny_model.__wrapped__(kind, seed=9).model.layers[0]
    layer.input_layernorm = torch.nn.Identity()
    g = torch.Generator().manual_seed(0)
    fc = torch.randn(32, 64, generator=g) * 0.2
    embeds, hidden = torch.randn(1, 11, 32, generator=g), torch.randn(1, 11, 32, generator=g)
    own = {f"layers.0.{k}": v for k, v in layer.state_dict().items()} | {"fc.weight": fc}
    fused = torch.cat([embeds, hidden], -1) @ fc.T
    mask = torch.full((11, 11), -torch.inf).triu(1)[None, None]
    positions = model.model.rotary_emb(fused, torch.arange(11)[None])
    expected = layer(fused, attention_mask=mask, position_embeddings=positions)
    assert (run(own, model, embeds, hidden) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_version_has_only_the_drafters_own_tensors(kind: str) -> None:
    spec = spec_of(tiny_model(kind))
    names = drafter_names(spec)
    assert not any("embed" in n or "lm_head" in n or "input_layernorm" in n for n in names)
    check_tensors(random_drafter(spec), names, "drafter")
    with pytest.raises(WeightError):
        check_tensors(tensors_of(tiny_model(kind)), names, "drafter")


def test_reset_is_seeded_and_load_copies() -> None:
    spec = spec_of(tiny_model("qwen2"))
    one, two = EagleDrafter(spec), EagleDrafter(spec)
    one.reset(torch.Generator().manual_seed(4))
    two.reset(torch.Generator().manual_seed(4))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    given = {k: v.detach().clone() for k, v in random_drafter(spec, seed=3).items()}
    two.load(given)
    given["fc.weight"].zero_()
    assert two.fc().abs().sum() > 0 and two.tensors().keys() == drafter_names(spec).keys()
