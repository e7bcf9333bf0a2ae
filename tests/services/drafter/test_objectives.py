from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.drafter.objectives import OBJECTIVES, compared_at, draft_logprobs, target_logprobs

LOGIT = st.floats(-8, 8)
PAIRS = st.integers(2, 6).flatmap(
    lambda v: st.tuples(st.lists(LOGIT, min_size=v, max_size=v), st.lists(LOGIT, min_size=v, max_size=v))
)
TEMPERATURES = st.sampled_from([0.0, 0.5, 1.0, 1.6])
EVERY = pytest.mark.parametrize("name", OBJECTIVES)
ABOUT_ACCEPTANCE = pytest.mark.parametrize("name", ["total_variation", "acceptance_likelihood"])


def value(name: str, target: torch.Tensor, draft: torch.Tensor, temperature: float) -> torch.Tensor:
    at = compared_at(name, temperature)
    return OBJECTIVES[name](target_logprobs(target[None], at), draft_logprobs(draft[None], at))[0]


def softmax(logits: list[float], temperature: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def enumerated(name: str, target: list[float], draft: list[float], temperature: float) -> float:
    """Token by token, in plain numbers. At temperature 0 the target's one token against the draft at 1."""
    at = 1.0 if name == "cross_entropy" else temperature
    q = softmax(draft, at or 1.0)
    p = softmax(target, at) if at else [float(i == target.index(max(target))) for i in range(len(target))]
    alpha = sum(min(a, b) for a, b in zip(p, q, strict=True))
    return {
        "cross_entropy": -sum(a * math.log(b) for a, b in zip(p, q, strict=True)),
        "total_variation": 1 - alpha,
        "acceptance_likelihood": -math.log(alpha),
    }[name]


@EVERY
@given(pair=PAIRS, temperature=TEMPERATURES)
def test_value_is_that_of_plain_enumeration(
    name: str, pair: tuple[list[float], list[float]], temperature: float
) -> None:
    target, draft = (torch.tensor(x, dtype=torch.float64) for x in pair)
    assert float(value(name, target, draft, temperature)) == pytest.approx(
        enumerated(name, *pair, temperature), rel=1e-6, abs=1e-9
    )


@EVERY
@given(pair=PAIRS, temperature=TEMPERATURES)
def test_gradient_is_that_of_finite_differences(
    name: str, pair: tuple[list[float], list[float]], temperature: float
) -> None:
    """Where target_probs = draft_probs for a token the minimum has a kink: both sides bound the gradient there."""
    target, draft = (torch.tensor(x, dtype=torch.float64) for x in pair)
    draft.requires_grad_()
    value(name, target, draft, temperature).backward()
    grad, step = draft.grad, 1e-6
    assert grad is not None and torch.isfinite(grad).all()
    with torch.no_grad():
        here = value(name, target, draft, temperature)
        for i in range(len(draft)):
            moved = torch.zeros_like(draft)
            moved[i] = step
            up = float(value(name, target, draft + moved, temperature) - here) / step
            down = float(here - value(name, target, draft - moved, temperature)) / step
            low, high = min(up, down), max(up, down)
            assert low - 1e-4 <= float(grad[i]) <= high + 1e-4


@EVERY
@given(pair=PAIRS, temperature=st.sampled_from([0.5, 1.0, 1.6]))
def test_nothing_is_below_a_draft_equal_to_the_target(
    name: str, pair: tuple[list[float], list[float]], temperature: float
) -> None:
    target, draft = (torch.tensor(x, dtype=torch.float64) for x in pair)
    best = value(name, target, target, temperature)
    assert value(name, target, draft, temperature) >= best - 1e-12
    if name != "cross_entropy":
        assert float(best) == pytest.approx(0.0, abs=1e-12)
    at_best = target.clone().requires_grad_()
    value(name, target, at_best, temperature).backward()
    assert at_best.grad is not None and float(at_best.grad.abs().max()) < 1e-9, "a step from the optimum leads away"


@EVERY
@pytest.mark.parametrize("temperature", [0.0, 0.05, 1.0])
def test_a_draft_as_far_off_as_floats_go_stays_finite(name: str, temperature: float) -> None:
    target, draft = torch.zeros(1, 8), torch.zeros(1, 8)
    target[0, 0], draft[0, 1] = 300.0, 300.0
    draft.requires_grad_()
    loss = value(name, target[0], draft[0], temperature)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(draft.grad).all()


@ABOUT_ACCEPTANCE
def test_only_the_likelihood_pulls_where_the_draft_has_no_mass_on_the_targets_token(name: str) -> None:
    target, draft = torch.tensor([12.0, 0.0, 0.0]), torch.tensor([-12.0, 0.0, 0.0], requires_grad=True)
    value(name, target, draft, 1.0).backward()
    pull = -float(draft.grad[0])
    assert (pull < 1e-4) if name == "total_variation" else (pull > 0.05)


@EVERY
def test_descent_reaches_full_acceptance(name: str) -> None:
    """From a draft that differs everywhere: alpha rises to 1."""
    target = torch.randn(1, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draft = torch.randn(1, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([draft], lr=0.02)
    for _ in range(1500):
        optimizer.zero_grad()
        value(name, target[0], draft[0], 1.0).backward()
        optimizer.step()
    assert float(torch.minimum(target.softmax(-1), draft.detach().softmax(-1)).sum()) > 0.97
