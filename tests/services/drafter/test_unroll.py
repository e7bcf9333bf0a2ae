"""The unrolled drafter against a plain, entry-by-entry draft chain as the engine runs it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from services.drafter.packing import pack_states
from services.drafter.unroll import unroll
from services.models.drafter import draft_forward
from services.models.hidden import align
from services.models.layers import RopeTable, masked_attention

CPU = torch.device("cpu")


def draft_chain(drafter, embed, rope, aligned, start, depths):
    """Engine order: feed the true hidden states of entries 0..start, then the drafter's own output, one at a time."""
    layer, fc, cache, outputs = drafter.layer(), drafter.fc(), [], []

    def feed(entry, hidden):
        def attend(q, kv):
            cache.append(kv)
            both = torch.cat(cache, dim=1)
            return masked_attention(q, both[:, :, 0], both[:, :, 1], torch.zeros(1, 1, 1, both.shape[1]))

        turns = rope.at(torch.tensor([[entry]]))
        return draft_forward(
            fc, layer, drafter.spec, F.embedding(aligned.ids[entry], embed)[None, None], hidden, turns, attend
        )

    for entry in range(start + 1):
        out = feed(entry, aligned.hidden[entry][None, None])
    outputs.append(out[0, 0])
    for entry in range(start + 1, min(start + depths, len(aligned.ids))):
        out = feed(entry, out)
        outputs.append(out[0, 0])
    return outputs


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_every_depth_equals_the_engines_draft_chain(make_spec, make_drafter, make_states, make_head, kind) -> None:
    spec = make_spec(kind)
    drafter, embed, rope = make_drafter(spec), make_head().embed, RopeTable(spec, 64, CPU, torch.float32)
    states = make_states((3, 9), (2, 4), (4, 2), (1, 1))
    rows = pack_states(states, 64, CPU)[0]
    assert len(rows.layout.segments) < len(states), "some must share a row"
    depths = 4
    with torch.no_grad():
        outputs = unroll(drafter, rows, embed, rope, depths)
        checked = 0
        for member, (row, column) in zip(rows.members, rows.layout.starts, strict=True):
            aligned = align(states[member].input_ids, states[member].hidden, states[member].loss_mask)
            for start in range(len(aligned.ids)):
                for j, expected in enumerate(draft_chain(drafter, embed, rope, aligned, start, depths)):
                    assert rows.started(j)[row, column + start + j]
                    torch.testing.assert_close(outputs[j][row, column + start + j], expected, atol=2e-5, rtol=1e-4)
                    checked += 1
    lengths = [len(s.input_ids) - 1 for s in states]
    assert checked == sum(int(rows.started(j).sum()) for j in range(depths)) > 2 * sum(lengths)


def test_depths_differ_and_later_ones_do_not_see_true_hidden_states(
    make_spec, make_drafter, make_states, make_head
) -> None:
    """Depth 2 at entry t knows hidden[0..t-2] only: changing hidden[t-1] or hidden[t] must not move it."""
    spec = make_spec()
    drafter, embed, rope = make_drafter(spec), make_head().embed, RopeTable(spec, 64, CPU, torch.float32)
    (state,) = make_states((2, 8))
    t = 6
    state.hidden.requires_grad_()
    rows = pack_states([state], 64, CPU)[0]
    for depth, out in enumerate(unroll(drafter, rows, embed, rope, 4)):
        (grad,) = torch.autograd.grad(out[0, t].sum(), state.hidden, retain_graph=True)
        seen = (grad.abs().sum(-1) > 0).nonzero().flatten().tolist()
        assert seen == list(range(t - depth + 1))


def test_no_gradient_and_no_number_crosses_sequences(make_spec, make_drafter, make_states, make_head) -> None:
    spec = make_spec()
    drafter, embed, rope = make_drafter(spec), make_head().embed, RopeTable(spec, 64, CPU, torch.float32)
    states = make_states((3, 14), (2, 4), (4, 4))
    for s in states:
        s.hidden.requires_grad_()
    rows = pack_states(states, 64, CPU)[0]
    (first_row, first), (second_row, second) = rows.layout.starts[1:3]
    assert first_row == second_row
    outputs = unroll(drafter, rows, embed, rope, 4)
    for row, column, own in ((first_row, first, rows.members[1]), (second_row, second, rows.members[2])):
        place = slice(column, column + len(states[own].input_ids) - 1)
        valid = [rows.started(j)[row, place] for j in range(4)]
        total = sum(out[row, place][v].sum() for out, v in zip(outputs, valid, strict=True))
        grads = torch.autograd.grad(total, [s.hidden for s in states], retain_graph=True, allow_unused=True)
        for i, grad in enumerate(grads):
            assert bool(grad is not None and grad.abs().sum() > 0) is (i == own)


def test_extreme_padding_gives_no_nan(make_spec, make_drafter, make_states, make_head) -> None:
    spec = make_spec()
    drafter, rope = make_drafter(spec), RopeTable(spec, 64, CPU, torch.float32)
    rows = pack_states(make_states((1, 20), (1, 1)), 64, CPU)[0]
    outputs = unroll(drafter, rows, make_head().embed, rope, 6)
    sum(o.sum() for o in outputs).backward()
    assert all(torch.isfinite(o).all() for o in outputs)
    assert all(torch.isfinite(p.grad).all() for p in drafter.parameters())
