from __future__ import annotations

import pytest
import torch

from services.models.capture import target_states
from tests.services.models.tiny import FAMILIES, tiny_model

IDS = torch.arange(9)[None]


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_output_of_layer_k_is_the_input_of_the_next(kind: str) -> None:
    model = tiny_model(kind, num_hidden_layers=5)
    expected = model.model(input_ids=IDS, output_hidden_states=True)
    hidden, aux = target_states(model.base_model, (0, 2, 3), input_ids=IDS)
    assert torch.equal(hidden, expected.last_hidden_state)
    assert torch.equal(aux, torch.cat([expected.hidden_states[k] for k in (1, 3, 4)], -1))


def test_without_aux_layers_nothing_is_kept() -> None:
    model = tiny_model("qwen3")
    hidden, aux = target_states(model.base_model, (), input_ids=IDS)
    assert aux is None and torch.equal(hidden, model.model(input_ids=IDS).last_hidden_state)


def test_hooks_go_away_even_when_the_forward_fails() -> None:
    model = tiny_model("llama")
    before = [len(layer._forward_hooks) for layer in model.model.layers]
    target_states(model.base_model, (0, 1), input_ids=IDS)
    with pytest.raises(IndexError):
        target_states(model.base_model, (0, 1), input_ids=torch.full((1, 3), 10_000))
    assert [len(layer._forward_hooks) for layer in model.model.layers] == before


def test_aux_states_are_off_the_graph_and_the_hidden_state_on_it() -> None:
    model = tiny_model.__wrapped__("qwen3", seed=3).requires_grad_(True)
    hidden, aux = target_states(model.base_model, (0,), input_ids=IDS)
    assert hidden.requires_grad and not aux.requires_grad
