from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import DataError
from services.core.types import Prompt
from services.data.sampler import PromptCursor

PROMPTS = [Prompt(f"{i:03}", f"p{i}", (1,), "1", "t") for i in range(23)]


def ids(prompts) -> list[str]:
    return [p.id for p in prompts]


@given(size=st.integers(1, 23), counts=st.lists(st.integers(1, 23), max_size=30), seed=st.integers(0, 9))
def test_no_prompt_twice_within_an_epoch(size, counts, seed):
    cursor = PromptCursor(PROMPTS[:size], seed)
    seen: dict[int, list[str]] = {}
    for count in counts:
        if count > size:
            with pytest.raises(DataError):
                cursor.next(count)
            continue
        taken = ids(cursor.next(count))
        assert len(set(taken)) == count
        seen.setdefault(cursor.state()["epoch"], []).extend(taken)
    for taken in seen.values():
        assert len(set(taken)) == len(taken)


@given(before=st.integers(0, 20), seed=st.integers(0, 9))
def test_restored_position_goes_on_exactly(before, seed):
    first = PromptCursor(PROMPTS, seed)
    for _ in range(before):
        first.next(4)
    state = json.loads(json.dumps(first.state()))
    second = PromptCursor(PROMPTS[::-1], seed)  # the order of the file does not matter
    second.restore(state)
    assert [ids(first.next(4)) for _ in range(9)] == [ids(second.next(4)) for _ in range(9)]


def test_epochs_and_seeds_shuffle_differently_and_cover_the_set():
    cursor = PromptCursor(PROMPTS, 0)
    one, two = ids(cursor.next(23)), ids(cursor.next(23))
    assert sorted(one) == sorted(two) == ids(PROMPTS)
    assert one != two
    assert ids(PromptCursor(PROMPTS, 1).next(23)) != one
    assert ids(PromptCursor(PROMPTS, 0).next(23)) == one


def test_too_few_prompts_says_what_to_do():
    with pytest.raises(DataError, match=r"24 different prompts .* has 23.*prompts_per_step"):
        PromptCursor(PROMPTS, 0).next(24)


def test_another_set_or_seed_refuses_the_position():
    state = PromptCursor(PROMPTS, 0).state()
    for other in (PromptCursor(PROMPTS[1:], 0), PromptCursor(PROMPTS, 1)):
        with pytest.raises(DataError, match="another prompt set or seed"):
            other.restore(state)


def test_duplicates_are_refused():
    with pytest.raises(DataError, match="twice"):
        PromptCursor([*PROMPTS, PROMPTS[0]], 0)
