"""Sharing a round's draft tokens, and the rates it goes by."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.speculation.budget import AcceptanceRate, expected_accepted, share_budget

RATES = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0])), min_size=0, max_size=4)


def worth(expected: list[float], lengths: tuple[int, ...]) -> float:
    return sum(expected_accepted([p] * n) for p, n in zip(expected, lengths, strict=True))


@given(RATES, st.integers(0, 9), st.integers(0, 4))
def test_no_other_sharing_is_worth_more(expected: list[float], budget: int, deepest: int) -> None:
    chosen = share_budget(expected, budget, deepest)
    assert len(chosen) == len(expected) and sum(chosen) <= budget and all(0 <= n <= deepest for n in chosen)
    every = itertools.product(range(deepest + 1), repeat=len(expected))
    best = max(worth(expected, lengths) for lengths in every if sum(lengths) <= budget)
    assert worth(expected, chosen) == pytest.approx(best, abs=1e-12)


@given(RATES, st.integers(0, 9), st.integers(0, 4))
def test_a_better_request_never_gets_less(expected: list[float], budget: int, deepest: int) -> None:
    chosen = share_budget(expected, budget, deepest)
    for (p, n), (q, m) in itertools.permutations(zip(expected, chosen, strict=True), 2):
        assert n >= m or p <= q
    assert all(n == 0 for p, n in zip(expected, chosen, strict=True) if p == 0), "what is never accepted costs nothing"


def test_certain_requests_take_all_there_is_and_equal_ones_share() -> None:
    assert share_budget([1.0, 0.3], 4, 4) == (4, 0)
    assert share_budget([0.5, 0.5, 0.5], 6, 9) == (2, 2, 2)
    assert share_budget([0.9, 0.1], 4, 9) == (4, 0) and share_budget([0.9, 0.7], 6, 9) == (5, 1)


def test_expected_accepted_is_the_sum_over_all_ends() -> None:
    rates = [0.9, 0.5, 0.2]
    ends = [0.1, 0.9 * 0.5, 0.9 * 0.5 * 0.8, 0.9 * 0.5 * 0.2]  # accepted 0, 1, 2, 3
    assert expected_accepted(rates) == pytest.approx(sum(n * p for n, p in enumerate(ends)))
    assert expected_accepted([]) == 0


# -- rates


def test_a_request_without_rounds_has_the_prior_and_a_long_one_its_own() -> None:
    rate = AcceptanceRate()
    assert rate.estimate(0.6) == pytest.approx(0.6)
    for _ in range(200):
        rate.record(3, 1)
    assert rate.estimate(0.9) == pytest.approx(1 / 3, abs=0.08)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40), st.floats(0, 1))
def test_estimates_stay_between_what_was_seen_and_the_prior(rounds: list[tuple[int, int]], prior: float) -> None:
    rate = AcceptanceRate()
    for tried, accepted in rounds:
        rate.record(tried, min(tried, accepted))
    seen = [min(t, a) / t for t, a in rounds if t]
    assert min([prior, *seen]) - 1e-9 <= rate.estimate(prior) <= max([prior, *seen]) + 1e-9


def test_a_change_is_followed() -> None:
    rate = AcceptanceRate()
    for accepted in [4] * 100 + [1] * 40:
        rate.record(4, accepted)
    assert rate.estimate(0.5) < 0.4
