from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.core.types import SamplingParams
from services.models.sampling import process_logits, sampling_tensors
from services.speculation.drafting import draw_children
from tests.services.models.tiny import CPU
from tests.services.speculation.enumeration import child_draws

MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.6, top_k=3),
    SamplingParams(top_k=1),
]


def test_one_child_has_exactly_the_processed_distribution() -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(0)).double()
    for p in MIXED:
        s = sampling_tensors([p], CPU)
        probs = process_logits(logits[None], s).softmax(-1)[0]
        law = torch.zeros(6, dtype=torch.float64)
        for share, tokens, drawn_from in child_draws(logits, s, 1):
            law[tokens[0]] += share
            assert torch.allclose(drawn_from[0], probs)
        assert (law - probs).abs().max() < 1e-8


def test_siblings_are_drawn_without_replacement() -> None:
    """The law of the ordered pair is q(a) q(b) / (1 - q(a)), enumerated."""
    logits = torch.randn(5, generator=torch.Generator().manual_seed(1)).double()
    s = sampling_tensors([SamplingParams(temperature=0.8)], CPU)
    q = process_logits(logits[None], s).softmax(-1)[0]
    pairs = child_draws(logits, s, 2)
    assert abs(sum(w for w, _, _ in pairs) - 1) < 1e-8 and len(pairs) == 20
    for share, (a, b), (first, second) in pairs:
        assert a != b and abs(share - float(q[a] * q[b] / (1 - q[a]))) < 1e-8
        assert torch.allclose(first, q) and second[a] == 0 and abs(float(second.sum()) - 1) < 1e-9
        assert torch.allclose(second * (1 - q[a]), q * (torch.arange(5) != a))


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_rows_do_not_disturb_each_other_and_surplus_siblings_are_empty(seed: int, count: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(MIXED), 7, generator=g) * 3
    u = torch.rand(len(MIXED), count, generator=g, dtype=torch.float64)
    tokens, probs = draw_children(logits, sampling_tensors(MIXED, CPU), count, True, u)
    assert probs is not None and tokens.shape == (4, count) and probs.shape == (4, count, 7)
    for i, p in enumerate(MIXED):
        alone, alone_probs = draw_children(logits[i : i + 1], sampling_tensors([p], CPU), count, True, u[i : i + 1])
        assert torch.equal(alone[0], tokens[i]) and alone_probs is not None and torch.allclose(alone_probs[0], probs[i])
        for j in range(count):
            mass = float(probs[i, j].sum())
            assert abs(mass - 1) < 1e-5 or mass == 0
            assert (probs[i, j, tokens[i, j]] > 0) == (mass > 0)
    assert torch.equal(tokens[1], logits[1].topk(count).indices)  # a greedy row takes its siblings from the top
    assert (probs[1].sum(-1) == 1).all()
    assert (probs[3, 1:].sum(-1) == 0).all()  # top_k 1: one token, no second sibling


@given(st.integers(0, 10_000), st.floats(1, 60))
def test_what_siblings_are_drawn_from_is_a_distribution_or_nothing(seed: int, spread: float) -> None:
    """However certain the drafter: each recorded distribution sums to one, or to zero and is refused."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(16, 6, generator=g) * spread
    u = torch.rand(16, 4, generator=g, dtype=torch.float64)
    _, probs = draw_children(logits, sampling_tensors([SamplingParams(temperature=0.3)] * 16, CPU), 4, True, u)
    assert probs is not None
    mass = probs.double().sum(-1)
    assert (((mass - 1).abs() < 1e-5) | (mass == 0)).all()


def test_argmax_children_are_the_best_and_have_no_distribution() -> None:
    logits = torch.tensor([[0.0, 5.0, 3.0, 4.0], [9.0, 1.0, 2.0, 8.0]])
    for sampled, u in ((False, None), (False, torch.rand(2, 3).double()), (True, None)):
        tokens, probs = draw_children(logits, sampling_tensors([SamplingParams()] * 2, CPU), 3, sampled, u)
        assert tokens.tolist() == [[1, 3, 2], [0, 3, 2]] and probs is None
