from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.extract import after_thinking, final_answer, last_boxed


@pytest.mark.parametrize(
    ("text", "marker", "finished", "answer"),
    [
        ("1+2=3; #3", "#", True, "3"),
        ("#1 no, #2", "#", True, "2"),
        ("#3 \n", "#", True, "3"),
        ("#3", "#", False, "3"),
        ("3", "#", True, None),
        ("", "#", True, None),
        ("#", "#", True, None),
        ("#3#", "#", True, None),
        ("#3 #  ", "#", True, None),
        ("so the answer: 4", "answer:", True, "4"),
        (" whole\nresponse ", "", True, "whole\nresponse"),
        ("cut off", "", False, None),
        ("", "", True, None),
        ("<think>#3", "#", True, None),
        ("<think>#3</think>#4", "#", True, "4"),
        ("<think>#3</think>", "#", True, None),
        ("opened by the template #3</think> #5", "#", True, "5"),
        ("<think>a</think><think>#6", "#", True, None),
    ],
)
def test_final_answer(text, marker, finished, answer):
    assert final_answer(text, marker, finished) == answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{3}", "3"),
        (r"\boxed{\frac{1}{2}} then", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed {7}", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{1} so \boxed{2", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed 3", None),
        (r"\boxed{3\}", None),
        ("\\boxed{3\\", None),
        ("boxed{3}", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@given(st.text(alphabet="ab{} \\x", max_size=30))
def test_last_boxed_is_always_balanced(inner):
    found = last_boxed(f"\\boxed{{{inner}")
    if found is not None:
        bare = found.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
        assert bare.count("{") == bare.count("}")


@given(st.text(max_size=20), st.text(max_size=20))
def test_the_last_marker_wins(before, answer):
    if "#" not in answer and "<" not in before + answer:
        assert final_answer(f"{before}#{answer}", "#", True) == (answer.strip() or None)


def test_after_thinking_keeps_text_without_thoughts():
    assert after_thinking("plain") == "plain"
