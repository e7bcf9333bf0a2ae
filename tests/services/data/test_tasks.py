from __future__ import annotations

from random import Random
from statistics import median

import pytest
from reasoning_gym.factory import get_score_answer_fn

from services.config.schema import ReasoningGymData
from services.core.errors import DataError
from services.data.tasks import generate_problems, num_terms

TERMS = ReasoningGymData.SkewedTerms(median=4, sigma=0.9, min=2, max=40)
SUMS = ReasoningGymData(params={"min_digits": 1, "max_digits": 2}, terms=TERMS, size=600, template="{expression}=")


def test_problems_are_distinct_right_and_long_tailed():
    problems = generate_problems(SUMS, seed=3)
    assert len({p.id for p in problems}) == len(problems) == 600
    score = get_score_answer_fn("chain_sum")
    for p in problems:
        assert p.text.endswith("=") and eval(p.text[:-1]) == int(p.answer)
        assert score(p.answer, {"question": p.meta["question"], "answer": p.answer, "metadata": p.meta}) == 1.0
    counts = sorted(p.meta["num_terms"] for p in problems)
    assert counts[0] == 2 and counts[-1] <= 40
    assert counts[int(len(counts) * 0.99)] >= 5 * median(counts)


def test_same_seed_same_problems_and_other_seed_others():
    small = SUMS.model_copy(update={"size": 40})
    assert generate_problems(small, 1) == generate_problems(small, 1)
    assert {p.id for p in generate_problems(small, 1)} != {p.id for p in generate_problems(small, 2)}


def test_number_of_terms_is_a_clipped_log_normal():
    rng = Random(0)
    draws = [num_terms(TERMS, rng) for _ in range(4000)]
    assert min(draws) == 2 and max(draws) == 40
    assert 3.5 <= median(draws) <= 4.5
    assert {num_terms(TERMS.model_copy(update={"sigma": 0.0}), rng) for _ in range(20)} == {4}


@pytest.mark.parametrize("task", ["basic_arithmetic", "products", "leg_counting", "graph_color", "word_ladder"])
def test_other_tasks_work_with_their_question(task):
    problems = generate_problems(ReasoningGymData(task=task, size=5), seed=0)
    assert len({p.id for p in problems}) == 5
    assert all(p.text == p.meta["question"] and isinstance(p.answer, str) for p in problems)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"task": "chain_sums"}, "chain_sum'"),
        ({"params": {"digits": 3}}, "no parameter digits.*max_digits"),
        ({"params": {"min_digits": 5, "max_digits": 2}}, "refuses data.source.params"),
        ({"params": {"min_terms": 2}}, "leave min_terms and max_terms out"),
        ({"task": "leg_counting"}, "has no number of terms.*chain_sum"),
        ({"template": "{expresion}="}, "expresion.*'expression'"),
        ({"template": "{"}, "does not fit"),
        ({"params": {"max_digits": 1}, "terms": ReasoningGymData.SkewedTerms(max=2), "size": 300}, "only 200 distinct"),
    ],
)
def test_what_cannot_be_generated_says_the_remedy(change, match):
    base = SUMS.model_copy(update={"size": 30})
    if change.get("task") == "leg_counting":
        change = change | {"params": {}}
    with pytest.raises(DataError, match=match):
        generate_problems(base.model_copy(update=change), seed=0)
