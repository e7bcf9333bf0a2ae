from __future__ import annotations

import math

import pytest
import torch

from services.core.types import SamplingParams
from services.policy.logprobs import Scorer
from services.policy.packs import make_packs
from tests.services.policy.plain import one_by_one, processed

CPU = torch.device("cpu")
LENGTHS = [(3, 9), (5, 2), (1, 1), (4, 30), (2, 7), (6, 12), (3, 3)]
PARAMS = SamplingParams(temperature=0.7, top_p=0.9)


def packs_of(rollouts, budget, dtype=torch.float32):
    zeros = [0.0] * len(rollouts)
    return make_packs(rollouts, zeros, zeros, range(len(rollouts)), budget, CPU, dtype)


def scored(model, rollouts, budget):
    """Per rollout: (logprobs, hidden) from packed forwards."""
    found, scorer = {}, Scorer(model)
    for pack in packs_of(rollouts, budget, model.dtype):
        scores = scorer(pack)
        at = 0
        for i, length, (row, column) in zip(pack.members, pack.lengths, pack.layout.starts, strict=True):
            count = len(rollouts[i].response_ids)
            found[i] = (scores.logprobs[at : at + count], scores.hidden[row, column : column + length])
            at += count
    return found


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("budget", [64, 80, 4096])
def test_packed_equals_one_by_one(make_model, make_rollout, kind, budget) -> None:
    model = make_model(kind, tied=kind == "qwen3")
    rollouts = [make_rollout(i, p, r, sampling=PARAMS) for i, (p, r) in enumerate(LENGTHS)]
    for i, (logprobs, hidden) in scored(model, rollouts, budget).items():
        expected, states = one_by_one(model, rollouts[i])
        torch.testing.assert_close(logprobs, expected, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(hidden, states, atol=1e-4, rtol=1e-4)


def test_hidden_state_is_after_the_final_norm(make_model, make_rollout) -> None:
    model, rollout = make_model(), make_rollout(0)
    (logprobs, hidden) = scored(model, [rollout], 64)[0]
    logits = torch.nn.functional.linear(hidden, model.get_output_embeddings().weight)
    again = logits.log_softmax(-1)[3:-1].gather(-1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
    torch.testing.assert_close(again, logprobs)


def test_neighbours_in_a_row_do_not_leak(make_model, make_rollout) -> None:
    model = make_model()
    long = make_rollout(0, 4, 30)
    first, second = make_rollout(1, 3, 9), make_rollout(2, 4, 10)
    changed = make_rollout(1, 3, 9, response_ids=tuple((t + 1) % 24 for t in first.response_ids))
    pack = packs_of([long, first, second], 4096)[0]
    assert pack.layout.starts[1][0] == pack.layout.starts[2][0], "the two must share a row"
    before, after = scored(model, [long, first, second], 4096), scored(model, [long, changed, second], 4096)
    assert torch.equal(before[2][0], after[2][0]) and torch.equal(before[0][1], after[0][1])
    assert not torch.equal(before[1][0], after[1][0])


def test_gradient_stays_in_the_sequence(make_model, make_rollout) -> None:
    model = make_model()
    embeds = {}
    handle = model.model.embed_tokens.register_forward_hook(lambda m, i, out: embeds.update(x=out) or out.retain_grad())
    pack = packs_of([make_rollout(0, 4, 30), make_rollout(1, 3, 9), make_rollout(2, 4, 10)], 4096)[0]
    scores = Scorer(model)(pack)
    handle.remove()
    assert pack.members == (0, 2, 1) and pack.layout.starts[1][0] == pack.layout.starts[2][0]
    scores.logprobs[30:40].sum().backward()  # the ten response tokens of the second member
    row, column = pack.layout.starts[1]
    touched = embeds["x"].grad.abs().sum(-1) > 0
    assert touched[row, column : column + pack.lengths[1] - 1].all()
    touched[row, column : column + pack.lengths[1]] = False
    assert not touched.any()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=0.8, min_p=0.1),
        SamplingParams(temperature=0.6, top_k=7, top_p=0.8, min_p=0.05),
    ],
)
def test_same_convention_as_rollout(make_model, sample_rollout, sampling) -> None:
    """Row 49: filters and temperature on both sides, so the first ratio is 1; the raw logprobs are far away."""
    model = make_model()
    rollouts = [sample_rollout(model, i, 3 + i, 12, "g", sampling) for i in range(4)]
    for i, (logprobs, _) in scored(model, rollouts, 4096).items():
        torch.testing.assert_close(logprobs, torch.tensor(rollouts[i].rollout_logprobs), atol=1e-4, rtol=0)
        raw, _ = one_by_one(model, make_plain(rollouts[i]))
        assert (raw - logprobs).abs().mean() > 0.05


def make_plain(rollout):
    object.__setattr__(rollout, "sampling", SamplingParams())
    return rollout


def test_mixed_sampling_in_one_pack_and_finite_full_logprobs(make_model, make_rollout) -> None:
    model = make_model()
    kinds = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(temperature=2)]
    rollouts = [make_rollout(i, 4, 8, sampling=s) for i, s in enumerate(kinds)]
    scores = Scorer(model)(packs_of(rollouts, 4096)[0])
    assert torch.isfinite(scores.full_logprobs).all() and torch.isfinite(scores.entropy).all()
    assert not torch.isnan(scores.logprobs).any() and (scores.logprobs == -torch.inf).any()
    for i, (logprobs, _) in scored(model, rollouts, 4096).items():
        torch.testing.assert_close(logprobs, one_by_one(model, rollouts[i])[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.6, top_k=7, top_p=0.8), SamplingParams(0.0)])
def test_entropy_and_spread_are_the_mean_and_the_variance_of_what_a_token_drawn_costs(
    make_model, make_rollout, sampling
):
    model, rollout = make_model(), make_rollout(0, 4, 8, sampling=sampling)
    scores = Scorer(model)(packs_of([rollout], 4096)[0])
    probs = processed(model, rollout)[0].exp().double()
    for row, entropy, spread in zip(probs.tolist(), scores.entropy.tolist(), scores.spread.tolist(), strict=True):
        costs = [(p, -math.log(p)) for p in row if p > 0]
        mean = sum(p * cost for p, cost in costs)
        assert entropy == pytest.approx(mean, abs=1e-5)
        assert spread == pytest.approx(sum(p * (cost - mean) ** 2 for p, cost in costs), abs=1e-5)
