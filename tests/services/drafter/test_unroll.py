"""The unrolled drafter against a plain, entry-by-entry draft chain as the engine runs it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from services.drafter.packing import pack_states
from services.drafter.unroll import unroll
from services.models.hidden import align
from services.models.layers import RopeTable, masked_attention

CPU = torch.device("cpu")
METHODS = pytest.mark.parametrize("name", ["eagle", "eagle3"])


@pytest.fixture
def setting(make_method, make_drafter, make_head):
    """(drafter, the target's embedding, rope)"""

    def make(name: str, kind: str = "qwen3"):
        drafter = make_drafter(make_method(name, kind))
        return drafter, make_head().embed, RopeTable(drafter.method.spec, 64, CPU, torch.float32)

    return make


def draft_chain(drafter, embed, rope, aligned, start, depths):
    """Engine order: feed the true target states of entries 0..start, then the drafter's own output, one at a time."""
    network, cache, outputs = drafter.network(), [], []

    def feed(entry, hidden):
        def attend(q, kv):
            cache.append(kv)
            both = torch.cat(cache, dim=1)
            return masked_attention(q, both[:, :, 0], both[:, :, 1], torch.zeros(1, 1, 1, both.shape[1]))

        turns = rope.at(torch.tensor([[entry]]))
        return network.step(F.embedding(aligned.ids[entry], embed)[None, None], hidden, turns, attend)

    for entry in range(start + 1):
        out = feed(entry, network.enter(aligned.inputs[entry][None, None]))
    outputs.append(out.predicted[0, 0])
    for entry in range(start + 1, min(start + depths, len(aligned.ids))):
        out = feed(entry, out.hidden)
        outputs.append(out.predicted[0, 0])
    return outputs


@METHODS
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_every_depth_equals_the_engines_draft_chain(setting, make_states, name, kind) -> None:
    drafter, embed, rope = setting(name, kind)
    states = make_states((3, 9), (2, 4), (4, 2), (1, 1), name=name)
    rows = pack_states(states, 64, CPU)[0]
    assert len(rows.layout.segments) < len(states), "some must share a row"
    depths = 4
    with torch.no_grad():
        outputs = unroll(drafter, rows, embed, rope, depths)
        checked = 0
        for member, (row, column) in zip(rows.members, rows.layout.starts, strict=True):
            aligned = align(states[member])
            for start in range(len(aligned.ids)):
                for j, expected in enumerate(draft_chain(drafter, embed, rope, aligned, start, depths)):
                    assert rows.started(j)[row, column + start + j]
                    torch.testing.assert_close(outputs[j][row, column + start + j], expected, atol=2e-5, rtol=1e-4)
                    checked += 1
    lengths = [len(s.input_ids) - 1 for s in states]
    assert checked == sum(int(rows.started(j).sum()) for j in range(depths)) > 2 * sum(lengths)


@METHODS
def test_depths_differ_and_later_ones_do_not_see_true_states(setting, make_states, name) -> None:
    """Depth 2 at entry t knows the states of 0..t-2 only: changing those of t-1 or t must not move it."""
    drafter, embed, rope = setting(name)
    (state,) = make_states((2, 8), name=name)
    t = 6
    state.inputs.requires_grad_()
    rows = pack_states([state], 64, CPU)[0]
    for depth, out in enumerate(unroll(drafter, rows, embed, rope, 4)):
        (grad,) = torch.autograd.grad(out[0, t].square().sum(), state.inputs, retain_graph=True)
        seen = (grad.abs().sum(-1) > 0).nonzero().flatten().tolist()
        assert seen == list(range(t - depth + 1))


def test_eagle3_sees_the_target_through_its_aux_layers_only(setting, make_states) -> None:
    drafter, embed, rope = setting("eagle3")
    (state,) = make_states((2, 8), name="eagle3")
    before = unroll(drafter, pack_states([state], 64, CPU)[0], embed, rope, 3)
    state.hidden.zero_()  # what the loss compares with
    after = unroll(drafter, pack_states([state], 64, CPU)[0], embed, rope, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@METHODS
def test_no_gradient_and_no_number_crosses_sequences(setting, make_states, name) -> None:
    drafter, embed, rope = setting(name)
    states = make_states((3, 14), (2, 4), (4, 4), name=name)
    for s in states:
        s.inputs.requires_grad_()
    rows = pack_states(states, 64, CPU)[0]
    (first_row, first), (second_row, second) = rows.layout.starts[1:3]
    assert first_row == second_row
    outputs = unroll(drafter, rows, embed, rope, 4)
    for row, column, own in ((first_row, first, rows.members[1]), (second_row, second, rows.members[2])):
        place = slice(column, column + len(states[own].input_ids) - 1)
        valid = [rows.started(j)[row, place] for j in range(4)]
        total = sum(out[row, place][v].square().sum() for out, v in zip(outputs, valid, strict=True))
        grads = torch.autograd.grad(total, [s.inputs for s in states], retain_graph=True, allow_unused=True)
        for i, grad in enumerate(grads):
            assert bool(grad is not None and grad.abs().sum() > 0) is (i == own)


@METHODS
def test_extreme_padding_gives_no_nan(setting, make_states, name) -> None:
    drafter, embed, rope = setting(name)
    rows = pack_states(make_states((1, 20), (1, 1), name=name), 64, CPU)[0]
    outputs = unroll(drafter, rows, embed, rope, 6)
    sum(o.sum() for o in outputs).backward()
    assert all(torch.isfinite(o).all() for o in outputs)
    assert all(torch.isfinite(p.grad).all() for p in drafter.parameters())
