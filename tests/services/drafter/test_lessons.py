"""Every sequence is an exam before it is a lesson, and no more is held than was allowed."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.drafter.lessons import EXAM_SHARE, Lessons
from services.models.hidden import HiddenStates


def states(length: int, mark: int = 0, width: int = 4) -> HiddenStates:
    ids = torch.full((length,), mark)
    return HiddenStates(ids, torch.ones(length, width), torch.arange(length) >= 1, 0)


def marks(found: list[HiddenStates]) -> set[int]:
    return {int(s.input_ids[0]) for s in found}


ARRIVALS = st.lists(st.tuples(st.integers(3, 40), st.booleans()), max_size=60)


@settings(max_examples=60, deadline=None)
@given(ARRIVALS, st.integers(2_000, 40_000), st.integers(20, 200))
def test_bounds_hold_and_no_exam_was_a_lesson(arrivals: list[tuple[int, bool]], most: int, exam: int) -> None:
    kept, learned = Lessons(most, exam), set[int]()
    for mark, (length, examined) in enumerate(arrivals):
        kept.add([states(length, mark)], 2.0)
        assert kept.num_bytes <= most
        if kept.ready:
            learned |= marks(kept.draw(10_000, random.Random(0)))
        assert not learned & marks(kept.exam())
        if examined and kept.exam_full:
            used = marks(kept.exam())
            kept.use_up_exam(2.0)
            assert kept.exam() == [] and not kept.exam_full and used


def test_the_exam_is_the_newest_and_full_with_so_many_tokens() -> None:
    kept = Lessons(10**6, 50)
    kept.add([states(20, n) for n in range(2)], 1.0)
    assert not kept.exam_full and not kept.ready and kept.credit == 0
    kept.add([states(20, n) for n in range(2, 6)], 1.0)
    assert kept.exam_full and marks(kept.exam()) == {3, 4, 5}
    assert marks(kept.draw(10_000, random.Random(0))) == {0, 1, 2} and kept.credit == 60


def test_what_is_learned_from_earns_passes() -> None:
    kept = Lessons(10**6, 30)
    kept.add([states(20, n) for n in range(4)], 5.0)
    before = kept.credit
    kept.use_up_exam(0.5)
    assert before == 5.0 * 40 and kept.credit == before + 0.5 * 40


def test_what_teaches_nothing_is_left_out() -> None:
    kept = Lessons(4_000, 50)
    broken = states(20)
    broken.hidden[3, 2] = torch.nan
    prompt_only = HiddenStates(broken.input_ids, torch.ones(20, 4), torch.zeros(20, dtype=torch.bool), 0)
    huge = states(int(EXAM_SHARE * 4_000))
    kept.add([broken, prompt_only, huge], 1.0)
    assert len(kept) == 0 and kept.num_bytes == 0


def test_wide_states_make_a_short_exam_rather_than_none() -> None:
    kept = Lessons(40_000, 10**6)
    kept.add([states(10, n, width=64) for n in range(12)], 1.0)
    assert kept.exam_full and kept.num_bytes <= 40_000
