"""Each algorithm against a plain implementation of its paper's formula, response by response, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.config.policy import Algorithm, Cispo, CorrectionConfig, Dapo, DrGrpo, Grpo, Gspo, Rloo
from services.policy.correction import correction
from services.policy.loss import policy_loss, token_weights
from services.policy.surrogate import token_terms

ALGORITHMS: list[Algorithm] = [
    Grpo(),
    Grpo(clip_low=0.1, clip_high=0.3, aggregation="token"),
    DrGrpo(aggregation_constant=7.0),
    Dapo(),
    Gspo(clip_low=0.05, clip_high=0.1),
    Cispo(clip_high=0.3),
    Cispo(clip_low=0.2, clip_high=0.3),
    Rloo(),
]
Responses = list[tuple[list[float], list[float], float]]  # (policy logprobs, old logprobs, advantage)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(torch.maximum(x, x.new_tensor(low)), x.new_tensor(high))


def by_formula(algorithm: Algorithm, policy: Sequence[Tensor], old: Sequence[Tensor], gains: Sequence[float]) -> Tensor:
    """What is minimised, straight from the papers: sums over responses and tokens in float64."""
    per_response = []
    for now, before, gain in zip(policy, old, gains, strict=True):
        ratios = [(a - b).exp() for a, b in zip(now, before, strict=True)]
        if isinstance(algorithm, Rloo):
            terms = [-gain * a for a in now]
        elif isinstance(algorithm, Cispo):
            bounds = 1 - algorithm.clip_low, 1 + algorithm.clip_high
            terms = [-clip(r, *bounds).detach() * gain * a for r, a in zip(ratios, now, strict=True)]
        elif isinstance(algorithm, Gspo):
            whole = ((now - before).sum() / len(now)).exp()
            bounded = clip(whole, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
            terms = [-torch.minimum(whole * gain, bounded * gain)] * len(now)
        else:
            bounds = 1 - algorithm.clip_low, 1 + algorithm.clip_high
            terms = [-torch.minimum(r * gain, clip(r, *bounds) * gain) for r in ratios]
        per_response.append(torch.stack(terms))
    if algorithm.aggregation == "token":
        return torch.cat(per_response).mean()
    if algorithm.aggregation == "sequence":
        return torch.stack([t.mean() for t in per_response]).mean()
    return torch.stack([t.sum() / algorithm.aggregation_constant for t in per_response]).mean()


def ours(algorithm: Algorithm, policy: Sequence[Tensor], old: Sequence[Tensor], gains: Sequence[float]) -> Tensor:
    lengths = [len(p) for p in policy]
    counts = torch.tensor(lengths)
    weights = token_weights(lengths, algorithm.aggregation, algorithm.aggregation_constant)

    def spread(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(counts)

    mask = torch.ones(sum(lengths), dtype=torch.bool)
    segments = torch.arange(len(lengths)).repeat_interleave(counts)
    terms = token_terms(algorithm, torch.cat(list(policy)), torch.cat(list(old)), spread(gains), mask, segments)
    return policy_loss(terms, spread(weights), mask, 0.0)


RESPONSES = st.lists(
    st.tuples(
        st.lists(st.tuples(st.floats(-3, -0.01), st.floats(-0.5, 0.5)), min_size=1, max_size=6),
        st.floats(-2, 2),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60)
@given(RESPONSES)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_loss_and_gradient_are_the_formulas(algorithm: Algorithm, responses) -> None:
    gains = [gain for _, gain in responses]
    old = [torch.tensor([p - d for p, d in tokens], dtype=torch.float64) for tokens, _ in responses]
    both = []
    for compute in (by_formula, ours):
        policy = [
            torch.tensor([p for p, _ in tokens], dtype=torch.float64, requires_grad=True) for tokens, _ in responses
        ]
        loss = compute(algorithm, policy, old, gains)
        loss.backward()
        both.append((loss.item(), torch.cat([p.grad for p in policy if p.grad is not None])))
    assert both[1][0] == pytest.approx(both[0][0], rel=1e-9, abs=1e-12)
    torch.testing.assert_close(both[1][1], both[0][1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.parametrize("bad", [-1e30, math.inf, math.nan])
def test_masked_tokens_may_hold_anything_and_change_nothing(algorithm: Algorithm, bad: float) -> None:
    """Row 44 for every algorithm, those that mix a response's tokens included."""
    found = []
    for value in (-1.0, bad):
        policy = torch.tensor([-1.0, value, -2.0], dtype=torch.float64, requires_grad=True)
        old = torch.tensor([-1.1, value, -1.9], dtype=torch.float64)
        mask, segments = torch.tensor([True, False, True]), torch.tensor([0, 0, 1])
        gains = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
        loss = policy_loss(token_terms(algorithm, policy, old, gains, mask, segments), torch.ones(3), mask, 0.0)
        loss.backward()
        assert policy.grad is not None
        found.append((loss.item(), policy.grad.tolist()))
    assert found[0] == found[1] and found[0][1][1] == 0.0 and math.isfinite(found[0][0])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_all_algorithms_agree_on_the_first_update_but_for_the_clip(algorithm: Algorithm) -> None:
    """At ratio 1 the gradient of every token is minus its weight times its advantage."""
    policy = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    gains, mask = torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64), torch.ones(3, dtype=torch.bool)
    terms = token_terms(algorithm, policy, policy.detach(), gains, mask, torch.tensor([0, 0, 1]))
    weights = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    policy_loss(terms, weights, mask, 0.0).backward()
    assert policy.grad is not None and policy.grad.tolist() == pytest.approx([-0.5, -0.5, 0.5])
    assert not terms.clipped.any()


# -- importance correction


def weigh(trainer: list[float], rollout: list[float], segments: list[int], **config):
    given_ = torch.tensor(trainer), torch.tensor(rollout)
    mask = given_[0] > -50
    return correction(*given_, mask, torch.tensor(segments), CorrectionConfig(**config))


def test_truncated_token_weights() -> None:
    found = weigh([-1.0, -1.0, -2.0], [-1.0, -3.0, -1.0], [0, 0, 1], mode="truncate", high=2.0)
    assert found.weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-1)]) and found.cut.tolist() == [
        False,
        True,
        False,
    ]


def test_masked_token_weights() -> None:
    found = weigh([-1.0, -1.0, -2.0], [-1.1, -3.0, -1.0], [0, 0, 1], mode="mask", low=0.5, high=2.0)
    assert found.weights.tolist() == pytest.approx([math.exp(0.1), 0.0, 0.0]) and found.cut.tolist() == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_row_51_a_rejected_response_is_rejected_whole(level: str) -> None:
    """Its tokens differ in both directions; token by token two of three would be kept."""
    trainer, rollout = [-1.0, -1.0, -1.0, -1.0], [-1.0, -1.1, -5.0, -1.0]
    found = weigh(trainer, rollout, [0, 0, 0, 1], level=level, mode="mask", low=0.5, high=2.0)
    assert found.weights.tolist() == [0.0, 0.0, 0.0, 1.0] and found.cut.tolist() == [True, True, True, False]
    assert weigh(trainer, rollout, [0, 0, 0, 1], mode="mask").cut.tolist() == [False, False, True, False]


def test_levels_are_sum_and_mean_of_the_log_ratios() -> None:
    trainer, rollout = [-1.0, -1.0], [-1.2, -1.4]
    whole = weigh(trainer, rollout, [0, 0], level="sequence", high=10.0).weights
    mean = weigh(trainer, rollout, [0, 0], level="geometric", high=10.0).weights
    assert whole.tolist() == pytest.approx([math.exp(0.6)] * 2) and mean.tolist() == pytest.approx([math.exp(0.3)] * 2)


@given(st.lists(st.tuples(st.floats(-200, 0), st.floats(-200, 0)), min_size=1, max_size=8))
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weights_stay_finite_and_within_their_bounds(mode: str, level: str, pairs) -> None:
    found = weigh([a for a, _ in pairs], [b for _, b in pairs], [0] * len(pairs), mode=mode, level=level)
    assert bool(((found.weights >= 0) & (found.weights <= 2.0)).all())


def test_the_same_engine_needs_no_correction() -> None:
    for mode in ("truncate", "mask"):
        found = weigh([-1.0, -0.1], [-1.0, -0.1], [0, 1], mode=mode)
        assert found.weights.tolist() == [1.0, 1.0] and not found.cut.any()


@pytest.mark.parametrize("bounds", [{"low": 1.0}, {"high": 0.9}, {"low": 1.5, "high": 2.0}])
def test_bounds_that_leave_1_out_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="two sides of 1"):
        CorrectionConfig(**bounds)
