"""Who catches up, how far, and for whom it would not pay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.speculation.catching_up import catch_up_plan, expected_remaining

ROWS = st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 5000)), max_size=12)


@given(ROWS, st.integers(0, 3000), st.integers(1, 40))
def test_the_budget_holds_and_nobody_gets_more_than_is_missing(rows, budget: int, layers: int) -> None:
    missing, remaining = [m for m, _ in rows], [r for _, r in rows]
    amounts = catch_up_plan(missing, remaining, budget, layers)
    assert sum(amounts) <= budget and all(0 <= a <= m for a, m in zip(amounts, missing, strict=True))
    open_ = [r for r, a in enumerate(amounts) if a < missing[r] and a]
    assert len(open_) <= 1, "one row is done before the next begins"
    if sum(amounts) < budget:  # only rows that are not worth it go without
        whole = catch_up_plan(missing, remaining, sum(missing), layers)
        assert amounts == whole


@given(ROWS, st.integers(1, 40))
def test_rows_come_to_their_end_in_finitely_many_rounds(rows, layers: int) -> None:
    """Nobody who is worth it is put off for ever: what was begun comes first in the next round."""
    missing, remaining = [m for m, _ in rows], [r for _, r in rows]
    worth = [a > 0 for a in catch_up_plan(missing, remaining, sum(missing), layers)]
    for _ in range(-(-sum(missing) // 500)):
        amounts = catch_up_plan(missing, remaining, 500, layers)
        missing = [m - a for m, a in zip(missing, amounts, strict=True)]
    assert all(m == 0 for m, w in zip(missing, worth, strict=True) if w)


def test_the_longest_lived_come_first_by_what_they_cost() -> None:
    assert catch_up_plan([400, 400, 400], [500, 900, 700], 600, 28) == (0, 400, 200)
    assert catch_up_plan([400, 100], [500, 500], 100, 28) == (0, 100)
    assert catch_up_plan([300, 400], [500, 500], 400, 28) == (300, 100)


def test_a_request_near_its_end_does_not_repay_its_context() -> None:
    assert catch_up_plan([4000, 4000], [20, 2000], 10_000, 28) == (0, 4000)
    assert catch_up_plan([4000], [560], 10_000, 28) == (0,) and catch_up_plan([4000], [580], 10_000, 28) == (4000,)
    assert catch_up_plan([4000], [580], 10_000, 8) == (0,), "of few layers the drafter's is a larger part"


def test_a_short_prompt_is_not_weighed() -> None:
    assert catch_up_plan([128, 129], [1, 1], 10_000, 2) == (128, 0)


# -- how long others lasted


@given(st.integers(0, 3000), st.integers(0, 3000), st.lists(st.integers(0, 6000), max_size=30))
def test_between_nothing_and_what_is_left(generated: int, left: int, finished: list[int]) -> None:
    assert 0 <= expected_remaining(generated, left, finished) <= left


def test_responses_that_outlived_it_decide_and_shorter_ones_do_not() -> None:
    nobody = expected_remaining(1000, 7000, [])
    assert nobody == 1000, "as long again"
    assert expected_remaining(1000, 7000, [10] * 50) == nobody
    assert expected_remaining(1000, 7000, [1100] * 99) == pytest.approx(100 + 9)
    assert expected_remaining(1000, 7000, [7000] * 99) == pytest.approx(6000, rel=0.01)


def test_in_a_long_tail_the_old_last_longest() -> None:
    lengths = [round(40 * 1.06**n) for n in range(100)]  # from 40 to 12,000
    told = [expected_remaining(n, 20_000, lengths) for n in (0, 500, 2000)]
    assert told == sorted(told)


def test_a_new_response_is_expected_to_bring_something() -> None:
    assert expected_remaining(0, 8000, []) == 1000 and expected_remaining(0, 8000, [80] * 99) < 90
