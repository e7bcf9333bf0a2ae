"""Rounds by depth in one list of numbers: what goes in comes out."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.sglang.rounds import histograms, newest_depth, note_round

ROUNDS = st.lists(st.integers(0, 9).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=40)


@given(ROUNDS)
def test_every_round_is_found_under_its_depth_and_its_accepted_drafts(rounds: list[tuple[int, int]]) -> None:
    numbers: list[int] = []
    for depth, accepted in rounds:
        note_round(numbers, depth, accepted)
        assert newest_depth(numbers) == depth
    found = {(d, k): n for d, row in histograms(numbers).items() for k, n in enumerate(row) if n}
    assert found == Counter(rounds)
    assert all(len(row) == depth + 1 for depth, row in histograms(numbers).items())
    assert sum(numbers[1:]) == len(rounds)


def test_without_a_round_there_is_nothing() -> None:
    assert histograms([]) == {} and newest_depth([]) is None


def test_more_accepted_than_drafted_is_a_programming_error() -> None:
    with pytest.raises(AssertionError):
        note_round([], 2, 3)
