from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import DataError
from services.data.traces import CHARACTERS, chain_sum_trace

numbers = st.integers(-99, 999)


@given(first=numbers, rest=st.lists(st.tuples(st.sampled_from("+-"), numbers), max_size=40), seed=st.integers(0, 99))
def test_traces_end_in_the_answer_and_every_step_holds(first, rest, seed):
    prompt = f"{first}" + "".join(f" {sign} {value}" for sign, value in rest) + "="
    expected = first + sum(value if sign == "+" else -value for sign, value in rest)
    trace = chain_sum_trace(prompt, Random(seed))
    assert trace.endswith(f"#{expected}") and trace.count("#") == 1
    assert set(trace) <= set(CHARACTERS)
    steps = re.findall(r"(-?\d+)([+-])(-?\d+)=(-?\d+)", trace)
    assert len(steps) == len(rest)
    for left, sign, right, result in steps:
        assert int(left) + (1 if sign == "+" else -1) * int(right) == int(result)


def test_traces_vary_but_repeat_with_the_seed():
    prompt = "12 + 7 - 35 + 4="
    assert len({chain_sum_trace(prompt, Random(seed)) for seed in range(200)}) > 150
    assert chain_sum_trace(prompt, Random(7)) == chain_sum_trace(prompt, Random(7))


def test_length_comes_from_the_number_of_terms():
    rng = Random(0)

    def mean_length(terms: int) -> float:
        prompts = [" + ".join(str(rng.randint(0, 99)) for _ in range(terms)) + "=" for _ in range(200)]
        return sum(len(chain_sum_trace(p, rng)) for p in prompts) / len(prompts)

    assert 30 <= mean_length(4) <= 50
    assert mean_length(36) >= 7 * mean_length(4)


@pytest.mark.parametrize("prompt", ["", "=", "1 * 2=", "1 + =", "1 2=", "what is 1 + 2?", "1 + 2 = 3", "1 +- - 2="])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(DataError, match="not a chain sum"):
        chain_sum_trace(prompt, Random(0))
