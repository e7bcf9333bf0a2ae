from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import DataError
from services.core.types import Prompt
from services.data.prompts import prompt_id
from services.data.split import is_heldout, split_prompts

texts = st.text(max_size=20).filter(lambda t: t.isprintable())
fractions = st.floats(0.01, 0.99)


def prompt(text: str, task: str = "t") -> Prompt:
    return Prompt(prompt_id(task, text), text, (1,), "1", task)


@given(st.lists(texts, min_size=2, max_size=60, unique=True), fractions, st.randoms())
def test_split_does_not_depend_on_order_and_shares_nothing(given_texts, fraction, rng):
    prompts = [prompt(t) for t in given_texts] + [prompt(t, "other task") for t in given_texts]
    try:
        split = split_prompts(prompts, fraction)
    except DataError:
        assert len({is_heldout(t, fraction) for t in given_texts}) == 1
        return
    assert not {p.text for p in split.train} & {p.text for p in split.heldout}
    assert {p.id for p in (*split.train, *split.heldout)} == {p.id for p in prompts}
    shuffled = prompts.copy()
    rng.shuffle(shuffled)
    again = split_prompts(shuffled, fraction)
    assert {p.id for p in again.heldout} == {p.id for p in split.heldout}


@given(texts, fractions, fractions)
def test_a_larger_fraction_keeps_what_a_smaller_one_held_out(text, one, other):
    small, large = sorted((one, other))
    assert not is_heldout(text, small) or is_heldout(text, large)


def test_share_is_about_the_fraction_and_stable_across_versions():
    held = [i for i in range(5000) if is_heldout(f"{i} + 1=", 0.1)]
    assert 420 <= len(held) <= 580
    assert held[:4] == [3, 12, 15, 18]


def test_an_empty_side_is_an_error():
    with pytest.raises(DataError, match=r"no held-out prompt is left of 1"):
        split_prompts([prompt("1")], 0.01)
    with pytest.raises(DataError, match="no training prompt"):
        split_prompts([prompt("1")], 0.999)


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_ids_tell_task_and_text_apart(task, text, other_task, other_text):
    same = (task, text) == (other_task, other_text)
    assert (prompt_id(task, text) == prompt_id(other_task, other_text)) == same
