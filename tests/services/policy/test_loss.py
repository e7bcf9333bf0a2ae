from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.policy.loss import kl_to_reference, policy_loss, token_weights
from services.policy.surrogate import clipped_surrogate, masked_difference


def terms(policy: Tensor, rollout: Tensor, advantage: Tensor, mask: Tensor | None = None):
    mask = torch.ones_like(policy, dtype=torch.bool) if mask is None else mask
    return clipped_surrogate(masked_difference(policy, rollout, mask), advantage, mask, 0.2, 0.28)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "slope"),
    [
        (1.0, 2.0, -2.0, False, -2.0),
        (1.2, 1.0, -1.2, False, -1.2),
        (1.5, 1.0, -1.28, True, 0.0),  # above the high bound: no further gain
        (1.5, -1.0, 1.5, False, 1.5),  # a bad token that became likelier is always pulled back
        (0.5, -1.0, 0.8, True, 0.0),  # below the low bound
        (0.5, 1.0, -0.5, False, -0.5),
    ],
)
def test_two_sided_clip(ratio: float, advantage: float, loss: float, clipped: bool, slope: float) -> None:
    policy = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    found = terms(policy, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64))
    found.loss.sum().backward()
    assert found.loss.item() == pytest.approx(loss)
    assert bool(found.clipped) is clipped
    assert policy.grad is not None and policy.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("bad", [-100.0, -1e30, 1e30, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("where", ["rollout", "policy", "reference", "advantage", "weight"])
def test_masked_tokens_may_hold_anything(bad: float, where: str) -> None:
    """Row 44: 0 * inf is NaN, so the mask must act before exp, for every input."""
    given_ = {name: torch.tensor([-1.0, -1.0]) for name in ("policy", "rollout", "reference", "advantage", "weight")}
    given_[where][1] = bad
    policy = given_["policy"].clone().requires_grad_()
    mask = torch.tensor([True, False])
    found = terms(policy, given_["rollout"], given_["advantage"], mask)
    kl = kl_to_reference(policy, given_["reference"], mask, "k3")
    loss = torch.where(mask, given_["weight"] * (found.loss + kl), 0.0).sum()
    own = policy_loss(found, given_["weight"], mask, 0.0)
    (loss + own).backward()
    assert torch.isfinite(loss) and torch.isfinite(own)
    assert policy.grad is not None and torch.isfinite(policy.grad).all() and policy.grad[1] == 0


@pytest.mark.parametrize("gap", [99.0, -99.0, 1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_huge_ratio_on_a_trained_token_stays_finite(gap: float, advantage: float) -> None:
    policy = torch.tensor([-1.0], requires_grad=True)
    found = terms(policy, torch.tensor([-1.0 - gap]), torch.tensor([advantage]))
    found.loss.sum().backward()
    assert torch.isfinite(found.loss).all() and policy.grad is not None and torch.isfinite(policy.grad).all()


def test_all_masked_is_zero_with_zero_gradient() -> None:
    """Row 45."""
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    mask = torch.zeros(2, dtype=torch.bool)
    found = terms(policy, torch.full((2,), -torch.inf), torch.ones(2), mask)
    loss = policy_loss(found, torch.ones(2), mask, 0.0)
    loss.backward()
    assert loss.item() == 0.0 and policy.grad is not None and policy.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
@pytest.mark.parametrize("name", ["token", "sequence", "constant"])
def test_no_trained_tokens_give_no_weights(lengths: tuple[int, ...], name: str) -> None:
    assert token_weights(lengths, name, 512.0) == (0.0,) * len(lengths)


def test_aggregations_differ_in_how_length_counts() -> None:
    """Row 47: a short right answer (2 tokens) and a long wrong one (8 tokens), surrogate -1 and +1 per token."""
    losses = {}
    for name in ("token", "sequence", "constant"):
        short, long = token_weights((2, 8), name, 10.0)
        losses[name] = (-2 * short, 8 * long)
    assert losses["token"] == pytest.approx((-0.2, 0.8))
    assert losses["sequence"] == pytest.approx((-0.5, 0.5))  # the length bias: 4 times less per long token
    assert losses["constant"] == pytest.approx((-0.1, 0.4))
    short, long = token_weights((2, 8), "constant", 10.0)
    assert short == long == pytest.approx(1 / 20)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=10))
def test_weights_add_up(lengths: list[int]) -> None:
    any_token = 1.0 if any(lengths) else 0.0
    for name in ("token", "sequence"):
        weights = token_weights(lengths, name, 7.0)
        assert sum(w * n for w, n in zip(weights, lengths, strict=True)) == pytest.approx(any_token)
    assert len({w for w, n in zip(token_weights(lengths, "constant", 7.0), lengths, strict=True) if n}) <= 1


def test_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match="median"):
        token_weights((1,), "median", 1.0)


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k2_and_k3_are_never_negative_and_all_are_zero_at_equality(policy: float, reference: float) -> None:
    mask = torch.ones(1, dtype=torch.bool)
    for estimator in ("k1", "k2", "k3"):
        found = kl_to_reference(torch.tensor([policy]), torch.tensor([reference]), mask, estimator)
        assert math.isfinite(found.item()) and (estimator == "k1" or found.item() >= -1e-5)
        assert kl_to_reference(torch.tensor([policy]), torch.tensor([policy]), mask, estimator).item() == 0


def test_kl_estimators_by_enumeration() -> None:
    """Over a vocabulary of four, in expectation under the policy: k1 and k3 are the divergence, and k2's gradient is
    its gradient, k1's is zero (what each token's log-probability feels when tokens are drawn from the policy)."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    mask = torch.ones(4, dtype=torch.bool)
    probs = logits.log_softmax(-1).exp().detach()
    true = (logits.log_softmax(-1).exp() * (logits.log_softmax(-1) - reference)).sum()
    (wanted,) = torch.autograd.grad(true, logits)
    gradients = {}
    for estimator in ("k1", "k2", "k3"):
        mean = (probs * kl_to_reference(logits.log_softmax(-1), reference, mask, estimator)).sum()
        (gradients[estimator],) = torch.autograd.grad(mean, logits)
        assert (estimator == "k2") is not (abs(mean.item() - true.item()) < 1e-12)
    assert gradients["k2"].tolist() == pytest.approx(wanted.tolist(), abs=1e-12)
    assert gradients["k1"].abs().max() < 1e-12 < (gradients["k3"] - wanted).abs().max()


def test_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_to_reference(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), "k4")
