"""Activation checkpointing keeps less and computes the same."""

from __future__ import annotations

from typing import Any

import torch

from services.policy.recompute import recompute_layers
from tests.services.policy.teams import VOCAB, Case, new_model, outcome_of


def test_the_same_gradients_to_the_bit() -> None:
    plain, again = (outcome_of(Case({"activation_checkpointing": on, "kl_coef": 0.1})) for on in (False, True))
    assert plain.reports == again.reports
    assert all(torch.equal(a, b) for a, b in zip(plain.gradients, again.gradients, strict=True))
    assert all(torch.equal(t, again.state[name]) for name, t in plain.state.items())


def kept_bytes(model: Any) -> int:
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(input_ids=torch.arange(VOCAB).repeat(4, 4), use_cache=False).last_hidden_state
    hidden.sum().backward()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(n for place, n in seen.items() if place not in weights)


def test_a_fraction_of_the_activations_is_kept() -> None:
    whole = kept_bytes(new_model())
    model = new_model()
    names = [n for n, _ in model.named_parameters()]
    recompute_layers(model)
    assert [n for n, _ in model.named_parameters()] == names
    assert kept_bytes(model) < 0.35 * whole
