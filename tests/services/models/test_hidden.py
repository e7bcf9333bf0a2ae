from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.models.hidden import HiddenStates, align
from tests.services.models.tiny import tiny_model


@given(st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_row_28_ids_states_and_mask_shift_in_lockstep(prompt: int, response: int, with_aux: bool) -> None:
    length = prompt + response
    ids = torch.arange(100, 100 + length)
    hidden = torch.arange(length, dtype=torch.float32)[:, None].expand(length, 3)
    supervised = torch.arange(length) >= prompt
    aux = hidden.repeat(1, 3) * 10 if with_aux else None
    a = align(HiddenStates(ids, hidden, supervised, 0, aux))
    for t in range(length - 1):
        assert a.ids[t] == 100 + t + 1 and a.positions[t] == t
        assert a.inputs[t].tolist() == ([10 * t] * 9 if with_aux else [t] * 3)
        assert a.target_hidden[t, 0] == t + 1  # whose LM head gives the token at t + 2
        assert a.loss_mask[t] == (prompt <= t + 2 < length)
    assert len(a.ids) == len(a.inputs) == len(a.positions) == len(a.target_hidden) == len(a.loss_mask) == length - 1


def test_row_28_the_example() -> None:
    """Prompt of 5, answer of 3 (tokens 5, 6, 7): supervised are the entries that draw exactly those."""
    a = align(HiddenStates(torch.arange(8), torch.zeros(8, 2), torch.arange(8) >= 5, 0))
    assert [t + 2 for t, on in enumerate(a.loss_mask.tolist()) if on] == [5, 6, 7]


def test_target_hidden_behind_the_head_is_the_next_distribution() -> None:
    model = tiny_model("qwen3")
    ids = torch.arange(12)
    out = model(input_ids=ids[None], output_hidden_states=True)
    a = align(HiddenStates(ids, out.hidden_states[-1][0], torch.ones(12, dtype=torch.bool), 0))
    assert torch.allclose(model.lm_head(a.target_hidden), out.logits[0, 1:], atol=1e-5)


def test_parts_must_have_one_length() -> None:
    with pytest.raises(AssertionError):
        HiddenStates(torch.arange(4), torch.zeros(3, 2), torch.ones(4, dtype=torch.bool), 0)
    with pytest.raises(AssertionError):
        HiddenStates(torch.arange(4), torch.zeros(4, 2), torch.ones(5, dtype=torch.bool), 0)
    with pytest.raises(AssertionError):
        HiddenStates(torch.arange(4), torch.zeros(4, 2), torch.ones(4, dtype=torch.bool), 0, torch.zeros(3, 6))
    states = HiddenStates(torch.arange(4), torch.zeros(4, 2), torch.ones(4, dtype=torch.bool), 0)
    assert states.num_bytes == 4 * 8 + 4 * 2 * 4 + 4
    with_aux = dataclasses.replace(states, aux=torch.zeros(4, 6))
    assert with_aux.num_bytes == states.num_bytes + 4 * 6 * 4


def test_detached_leaves_the_graph() -> None:
    hidden, aux = torch.zeros(4, 2, requires_grad=True) * 2, torch.zeros(4, 6, requires_grad=True) * 2
    live = HiddenStates(torch.arange(4), hidden, torch.ones(4, dtype=torch.bool), 0, aux)
    cut = live.detached()
    assert live.hidden.requires_grad and not cut.hidden.requires_grad and not cut.inputs.requires_grad


@pytest.mark.parametrize("aux", [None, torch.ones(4, 6)])
def test_copied_shares_no_memory(aux: torch.Tensor | None) -> None:
    states = HiddenStates(torch.arange(4), torch.ones(4, 2), torch.ones(4, dtype=torch.bool), 3, aux)
    copy = states.copied()
    assert copy.policy_version == 3 and (copy.aux is None) == (aux is None)
    for name in ("input_ids", "hidden", "loss_mask", "aux"):
        mine, theirs = getattr(states, name), getattr(copy, name)
        assert mine is None or (torch.equal(mine, theirs) and mine.data_ptr() != theirs.data_ptr())
