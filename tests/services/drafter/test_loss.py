from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from services.drafter.loss import LossTerms, chain_lengths, drafter_loss, expected_acceptance, supervised_counts
from services.drafter.objectives import OBJECTIVES
from services.drafter.packing import pack_states
from services.drafter.unroll import unroll
from services.models.layers import RopeTable

CPU = torch.device("cpu")
METHODS = pytest.mark.parametrize("name", ["eagle", "eagle3"])
EVERY_LOSS = pytest.mark.parametrize("loss", OBJECTIVES)


def terms(feature_weight=0.0, loss="cross_entropy", decay=0.8, temperature=1.0) -> LossTerms:
    return LossTerms(loss, feature_weight, decay, temperature)


def loss_of(drafter, batches, head, depths=3, temperature=1.0, loss="cross_entropy"):
    rope = RopeTable(drafter.method.spec, 64, CPU, torch.float32)
    counts, weight = supervised_counts(batches, depths), 0.2 if drafter.method.matches_features else 0.0
    chosen = terms(weight, loss, temperature=temperature)
    parts = [drafter_loss(unroll(drafter, b, head.embed, rope, depths), b, head.head, counts, chosen) for b in batches]
    return sum(p.loss for p in parts), counts, [sum(p.overlap[j].item() for p in parts) for j in range(depths)]


@EVERY_LOSS
@METHODS
@pytest.mark.parametrize(("prompt", "response"), [(5, 3), (1, 3), (2, 1), (5, 1), (3, 9)])
def test_supervision_starts_with_the_first_response_token_and_ends_before_the_end(
    make_states, make_head, prompt, response, name, loss
) -> None:
    """Row 28, prompt 5, answer 3: the entry that meets token T_start - 1 draws the first answer token and learns; the
    last entry would predict past the end and does not. Read off the gradient of each entry's prediction."""
    (state,) = make_states((prompt, response), name=name)
    head, weight = make_head(), 0.2 if name == "eagle" else 0.0
    rows = pack_states([state], 64, CPU)[0]
    predicted = torch.randn(1, prompt + response - 1, 32, requires_grad=True)
    drafter_loss([predicted], rows, head.head, supervised_counts([rows], 1), terms(weight, loss)).loss.backward()
    learning = (predicted.grad[0].abs().sum(-1) > 0).nonzero().flatten().tolist()
    # entry t meets input token t + 1 and predicts token t + 2
    expected = [t for t in range(prompt + response - 1) if prompt <= t + 2 < prompt + response]
    assert learning == expected
    if prompt >= 2:
        assert learning[0] + 1 == prompt - 1 and len(learning) == response
    assert predicted.grad[0, -1].abs().sum() == 0


def test_target_of_each_entry_is_the_targets_distribution_of_the_next_token(make_states, make_head) -> None:
    (state,) = make_states((5, 3))
    head = make_head()
    rows = pack_states([state], 64, CPU)[0]
    perfect = F.pad(state.hidden[1:], (0, 0))[None]
    found = drafter_loss([perfect], rows, head.head, supervised_counts([rows], 1), terms(1.0))
    logprobs = F.linear(state.hidden, head.head).log_softmax(-1)
    predicts = logprobs[4:7]  # positions 4, 5, 6 predict the answer tokens 5, 6, 7
    assert found.loss.item() == pytest.approx(-(predicts.exp() * predicts).sum(-1).mean().item(), rel=1e-5)
    assert found.overlap[0] == pytest.approx(3.0, rel=1e-5)


@EVERY_LOSS
@METHODS
def test_packed_equals_one_by_one_in_value_and_gradient(
    make_method, make_drafter, make_states, make_head, name, loss
) -> None:
    states, head = make_states((3, 14), (2, 4), (4, 4), (1, 7), (2, 1), (1, 1), name=name), make_head()
    found = []
    for budget in (17, 40, 400):
        drafter = make_drafter(make_method(name))
        total, counts, overlap = loss_of(drafter, pack_states(states, budget, CPU), head, loss=loss)
        total.backward()
        found.append((total.item(), counts, overlap, [p.grad for p in drafter.parameters()]))
    single = [b for s in states for b in pack_states([s], 400, CPU)]
    drafter = make_drafter(make_method(name))
    total, counts, overlap = loss_of(drafter, single, head, loss=loss)
    total.backward()
    for value, n, o, grads in found:
        assert value == pytest.approx(total.item(), rel=1e-5) and n == counts
        assert o == pytest.approx(overlap, rel=1e-5)
        for a, p in zip(grads, drafter.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, atol=1e-5, rtol=1e-4)


@EVERY_LOSS
@METHODS
def test_only_the_drafter_learns(make_method, make_drafter, make_states, make_head, name, loss) -> None:
    """Row 29: embedding, head and the policy's hidden states stay untouched even when they could take a gradient."""
    head = make_head()
    head.embed.requires_grad_()
    head.head.requires_grad_()
    states = make_states((3, 9), (2, 4), name=name)
    drafter = make_drafter(make_method(name))
    total, _, _ = loss_of(drafter, pack_states(states, 64, CPU), head, loss=loss)
    total.backward()
    assert head.embed.grad is None and head.head.grad is None
    assert all(s.hidden.grad is None and not s.hidden.requires_grad for s in states)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())


@EVERY_LOSS
@METHODS
def test_nothing_supervised_is_zero_not_nan(make_method, make_drafter, make_states, make_head, name, loss) -> None:
    states = make_states((6, 0), (1, 1), name=name)
    batches = pack_states(states, 64, CPU)
    total, counts, _ = loss_of(make_drafter(make_method(name)), batches, make_head(), loss=loss)
    assert counts == [0, 0, 0] and total.item() == 0.0


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
@METHODS
def test_chain_length_is_a_mean_of_products(
    make_method, make_drafter, make_states, make_head, temperature, name
) -> None:
    states, head, depths = make_states((3, 6), (2, 3), (1, 2), name=name), make_head(), 4
    drafter = make_drafter(make_method(name))
    rope = RopeTable(drafter.method.spec, 64, CPU, torch.float32)
    with torch.no_grad():
        rows = pack_states(states, 64, CPU)[0]
        predicted = unroll(drafter, rows, head.embed, rope, depths)
        alphas = expected_acceptance(predicted, rows, head.head, temperature)
        lengths = chain_lengths(alphas, rows)
    by_hand = []
    for member, (row, column) in zip(rows.members, rows.layout.starts, strict=True):
        s = states[member]
        count = len(s.input_ids) - 1
        for start in range(count):
            if start + 2 >= len(s.input_ids) or not s.loss_mask[start + 2]:
                continue
            total, product = 1.0, 1.0
            for j in range(depths):
                t = start + j
                if t + 2 >= len(s.input_ids):
                    break
                p = F.linear(s.hidden[t + 1], head.head)
                q = F.linear(predicted[j][row, column + t], head.head)
                if temperature:
                    p, q = (p / temperature).softmax(-1), (q / temperature).softmax(-1)
                    product *= torch.minimum(p, q).sum().item()
                else:
                    product *= float(p.argmax() == q.argmax())
                total += product
            by_hand.append(total)
    assert sorted(lengths.tolist()) == pytest.approx(sorted(by_hand), rel=1e-4)


def test_without_feature_weight_only_distributions_count(make_states, make_head) -> None:
    """EAGLE-3: a hidden state far from the target's that draws alike costs nothing more."""
    (state,) = make_states((5, 3), name="eagle3")
    rows, head = pack_states([state], 64, CPU)[0], torch.zeros(24, 32)
    far = rows.target_hidden + 1e30
    counts = supervised_counts([rows], 1)
    near = drafter_loss([rows.target_hidden], rows, head, counts, terms())
    assert drafter_loss([far], rows, head, counts, terms()).loss == near.loss
    assert drafter_loss([far], rows, head, counts, terms(0.2)).loss > near.loss


def test_a_perfect_drafter_is_accepted_to_the_end(make_states, make_head) -> None:
    (state,) = make_states((5, 3))
    rows = pack_states([state], 64, CPU)[0]
    alphas = expected_acceptance([rows.target_hidden] * 2, rows, make_head().head, 1.0)
    # from entries 3, 4, 5: two drafts fit, two, one (nothing can be committed past the end)
    assert chain_lengths(alphas, rows).tolist() == pytest.approx([3.0, 3.0, 2.0])


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@METHODS
def test_total_variation_is_one_minus_the_expected_acceptance_of_the_run(
    make_method, make_drafter, make_states, make_head, temperature, name
) -> None:
    """The mean over supervised entries, weighted by depth, at the run's temperature; nothing else is minimised."""
    states, head, depths = make_states((3, 6), (2, 3), (1, 2), name=name), make_head(), 3
    drafter = make_drafter(make_method(name))
    rows = pack_states(states, 64, CPU)[0]
    predicted = unroll(drafter, rows, head.embed, RopeTable(drafter.method.spec, 64, CPU, torch.float32), depths)
    counts = supervised_counts([rows], depths)
    chosen = terms(0.0, "total_variation", temperature=temperature)
    found = drafter_loss(predicted, rows, head.head, counts, chosen)
    alphas = expected_acceptance(predicted, rows, head.head, temperature)
    means = [float(a.detach().sum()) / n for a, n in zip(alphas, counts, strict=True)]
    by_hand = sum(0.8**j * (1 - m) for j, m in enumerate(means)) / sum(0.8**j for j in range(depths))
    assert found.loss.item() == pytest.approx(by_hand, rel=1e-5)
    assert [o / n for o, n in zip(found.overlap, counts, strict=True)] == pytest.approx(means, rel=1e-5)


def test_cross_entropy_compares_at_temperature_one_whatever_the_runs(make_states, make_head) -> None:
    (state,) = make_states((5, 3))
    rows, head = pack_states([state], 64, CPU)[0], make_head().head
    predicted, counts = [torch.randn(1, 7, 32)], supervised_counts([rows], 1)
    cold, hot = (drafter_loss(predicted, rows, head, counts, terms(temperature=t)) for t in (0.3, 1.0))
    assert cold.loss == hot.loss and cold.overlap != hot.overlap


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("loss", ["total_variation", "acceptance_likelihood"])
def test_cross_entropy_mixes_into_losses_about_acceptance_only(make_states, make_head, loss, temperature) -> None:
    states, head = make_states((5, 3), (2, 6)), make_head().head
    rows = pack_states(states, 64, CPU)[0]
    predicted = [torch.randn(rows.target_hidden.shape, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    counts = supervised_counts([rows], 2)

    def value(name: str, ce_weight: float) -> float:
        chosen = LossTerms(name, 0.2, 0.8, temperature, ce_weight)
        return drafter_loss(predicted, rows, head, counts, chosen).loss.item()

    features = value("cross_entropy", 0.0) - drafter_loss(predicted, rows, head, counts, terms()).loss.item()
    mixed = value(loss, 0.0) + 0.3 * (value("cross_entropy", 0.0) - features)
    assert value(loss, 0.3) == pytest.approx(mixed, rel=1e-5)
    assert value("cross_entropy", 0.3) == value("cross_entropy", 0.0)


@EVERY_LOSS
@METHODS
def test_nothing_of_a_loss_waits_for_the_device(make_method, make_drafter, make_states, make_head, name, loss) -> None:
    """On a device without values whoever asks for one fails: a mask that counts, a sum as a number. On a GPU each of
    some hundred in a micro-step had the processor wait, and then the GPU."""
    meta, drafter, found = torch.device("meta"), make_drafter(make_method(name)), make_head()
    batches = pack_states(make_states((3, 14), (2, 4), (4, 4), (1, 1), name=name), 20, meta)
    rope = RopeTable(drafter.method.spec, 64, meta, torch.float32)
    drafter, counts = drafter.to(meta), supervised_counts(batches, 3)
    embed, head = (t.to(meta) for t in (found.embed, found.head))
    for rows in batches:
        predicted = unroll(drafter, rows, embed, rope, 3)
        drafter_loss(predicted, rows, head, counts, terms(0.2, loss)).loss.backward()
        with torch.no_grad():
            chain_lengths(expected_acceptance(predicted, rows, head, 1.0), rows)
