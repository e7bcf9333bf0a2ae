"""What holds for every drafter method."""

from __future__ import annotations

import pytest
import torch

from services.core.errors import WeightError
from services.models.drafter import Drafter, DrafterMethod
from services.models.eagle import Eagle
from services.models.eagle3 import Eagle3
from services.models.layers import ModelSpec, RopeTable, masked_attention
from services.models.target import check_tensors
from tests.services.models.tiny import CPU, FAMILIES, random_drafter, spec_of, tensors_of, tiny_model

METHODS = {"eagle": Eagle, "eagle3": lambda spec: Eagle3(spec, (0, 1, 2))}


def method_of(name: str, spec: ModelSpec) -> DrafterMethod:
    return METHODS[name](spec)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", METHODS)
def test_a_version_has_only_the_drafters_own_tensors(kind: str, name: str) -> None:
    spec = spec_of(tiny_model(kind))
    method = method_of(name, spec)
    names = method.names()
    assert not any("embed" in n or "lm_head" in n or n.startswith("model.") for n in names)
    assert not names.keys() & method.engine_zeros().keys()
    check_tensors(random_drafter(spec, method=method), names, "drafter")
    with pytest.raises(WeightError):
        check_tensors(tensors_of(tiny_model(kind)), names, "drafter")


@pytest.mark.parametrize("name", METHODS)
def test_reset_is_seeded_and_load_copies(name: str) -> None:
    method = method_of(name, spec_of(tiny_model("qwen2")))
    one, two = Drafter(method), Drafter(method)
    one.reset(torch.Generator().manual_seed(4))
    two.reset(torch.Generator().manual_seed(4))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    given = {k: v.detach().clone() for k, v in random_drafter(method.target, seed=3, method=method).items()}
    two.load(given)
    given["fc.weight"].zero_()
    assert two.tensors()["fc.weight"].abs().sum() > 0 and two.tensors().keys() == method.names().keys()


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", METHODS)
def test_a_fresh_drafter_nearly_hands_its_highest_state_through(kind: str, name: str) -> None:
    """Training starts near the target's own state, not at nothing."""
    method = method_of(name, spec_of(tiny_model(kind)))
    drafter = Drafter(method)
    drafter.reset(torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(2)
    states, embeds = torch.randn(1, 9, method.state_size, generator=g), torch.randn(1, 9, 32, generator=g)
    rope = RopeTable(method.spec, 9, CPU, torch.float32).at(torch.arange(9)[None])

    def attend(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return masked_attention(q, kv[:, :, 0], kv[:, :, 1], None)

    network = drafter.network()
    out = network.step(embeds, network.enter(states), rope, attend)
    for found in out:
        assert torch.cosine_similarity(found, states[..., -32:], dim=-1).min() > 0.9
