from __future__ import annotations

import threading

import pytest
from pydantic import ValidationError
from reasoning_gym.factory import create_dataset

from services.config.reward import RewardConfig
from services.core.types import FinishReason, Reward
from services.reward.verifiers import make_verifier

RIGHT, WRONG = Reward(1.0, True), Reward(0.0, False)


@pytest.fixture(scope="module")
def verifiers():
    return {name: make_verifier(RewardConfig(verifier=name), {}) for name in ("task", "math", "exact")}


@pytest.mark.parametrize("name", ["task", "math", "exact"])
@pytest.mark.parametrize(
    ("text", "finish", "reward"),
    [
        ("2-18=-16; #-16", FinishReason.STOP, RIGHT),
        ("#-16 ", FinishReason.STOP, RIGHT),
        ("#3 no #-16", FinishReason.STOP, RIGHT),
        ("#-16 no #3", FinishReason.STOP, WRONG),
        ("#4", FinishReason.STOP, WRONG),
        ("-16", FinishReason.STOP, WRONG),
        ("", FinishReason.STOP, WRONG),
        ("2-18=-16; ", FinishReason.LENGTH, WRONG),
        ("2-18=-16", FinishReason.ABORT, WRONG),
    ],
)
def test_every_verifier_on_plain_answers(verifiers, pair, name, text, finish, reward):
    assert verifiers[name](*pair("-16", text, finish)) == reward


@pytest.mark.parametrize("name", ["task", "math", "exact"])
@pytest.mark.parametrize("last_id", [2, 3, 9])
def test_truncation_is_told_by_finish_reason(pair, name, last_id):
    """Row 52: a model may stop on another id than eos, or on a string; a cut-off one may end in an eos-like id."""
    verify = make_verifier(RewardConfig(verifier=name, answer_marker=""), {})
    assert verify(*pair("7", "7", FinishReason.STOP, last_id=last_id)) == RIGHT
    assert verify(*pair("7", "7", FinishReason.LENGTH, last_id=last_id)) == WRONG


def test_task_uses_the_tasks_own_scorer(verifiers, pair):
    task = verifiers["task"]
    assert task(*pair("1000", "#+01,000.00")) == RIGHT
    partial = task(*pair("1000", "#1000 apples"))
    assert 0 < partial.value < 1 and not partial.correct
    assert verifiers["exact"](*pair("1000", "#1,000")) == WRONG


@pytest.mark.parametrize("name", ["word_ladder", "countdown", "leg_counting"])
def test_task_gets_question_and_metadata(verifiers, pair, name):
    entry = create_dataset(name, seed=1, size=1)[0]
    meta = {"question": entry["question"], **entry["metadata"]}
    assert verifiers["task"](*pair(entry["answer"], f"#{entry['answer']}", task=name, meta=meta)) == RIGHT


def test_task_parameters_reach_the_scorer(pair):
    """decimal_arithmetic scores by its configured number of places."""
    loose = make_verifier(
        RewardConfig(), {"decimal_arithmetic": {"min_num_decimal_places": 1, "max_num_decimal_places": 1}}
    )
    tight = make_verifier(
        RewardConfig(), {"decimal_arithmetic": {"min_num_decimal_places": 6, "max_num_decimal_places": 6}}
    )
    close = pair("1.2000", "#1.2400", task="decimal_arithmetic")
    assert loose(*close).correct
    assert not tight(*close).correct


@pytest.mark.parametrize(
    ("answer", "text", "correct"),
    [
        (r"\frac{1}{2}", r"so \boxed{0.5}", True),
        ("1/2", r"\boxed{\frac{2}{4}}", True),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", False),
        ("12", r"\boxed{3} wrong, \boxed{12}", True),
        ("12", r"\boxed{12} wrong, \boxed{3}", False),
        ("12", r"#3 \boxed{12}", True),
        ("12", r"\boxed{12", False),
        ("12", r"<think>\boxed{12}", False),
        ("12", r"\boxed{}", False),
        (r"\frac12", r"#\frac{1}{2}", True),
        ("3", r"#\frac{1}{2} + 3", False),
        ("(1, 2)", "#(1, 2)", True),
        ("1,000", "#1000", True),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", True),
        ("12", "\\boxed{\n12\n}", True),
    ],
)
def test_math_reads_the_last_box(verifiers, pair, answer, text, correct):
    assert verifiers["math"](*pair(answer, text)).correct is correct


TALK = "This is why it must be so: the 7 apples were eaten by 300 people, or more. " * 5


@pytest.mark.parametrize(
    ("answer", "text", "correct"),
    [
        ("42", "#### 42", True),
        ("42", "####42", True),
        ("42", "#### 42.0", True),
        ("42", "#### 42%", True),
        ("1234", "#### $1,234", True),
        ("42", f"#### 42\n{TALK}", True),
        ("42", f"{TALK}#### 42\n\n{TALK}", True),
        ("7", f"#### 42\n{TALK}", False),
        ("300", f"#### 42\n{TALK}", False),
        ("-3", "#### -3", True),
        ("3", "#### -3", False),
        ("-3", "#### 3", False),
        ("42", "<think> #### 42", False),
        ("42", f"<think> {TALK} #### 42\n{TALK}", False),
        ("42", "<think> #### 7 </think> #### 42", True),
        (r"\frac{1}{2}", "#### \\frac{1}{2}\nso a half", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "#### \\begin{pmatrix}\n1\\\\\n2\\end{pmatrix}", True),
        ("42", "####", False),
        ("42", f"#### 42 {TALK}", True),
        ("7", f"#### 42 {TALK}", False),
        ("300", f"#### 42 {TALK}", False),
        ("42", "#### 42, because 7 apples", True),
        ("7", "#### 42, because 7 apples", False),
        ("42", "#### 42. 7 apples were eaten", True),
        ("7", "#### 42. 7 apples were eaten", False),
        ("42", "#### 42 (as 7 times 6)", True),
        ("42", "#### $42 since 6 of 7", True),
        ("42", "#### x = 42 because of 7", True),
        ("42", "#### the answer is 42 because of 7", True),
        ("42", "#### The answer: 42", True),
        ("-42", "#### So it is -42, not 7", True),
        ("Monday", "#### Monday", True),
        ("12", "#### 12 cm", True),
        ("-3", "#### -3 as 4 is more", True),
        ("4", "#### -3 as 4 is more", False),
        (r"\frac{1}{2}", r"#### \frac{1}{2} since 3 of 6", True),
        ("6", r"#### \frac{1}{2} since 3 of 6", False),
        ("1234", "#### 1,234 dollars, 5 more", True),
        ("12 hours 30 minutes", "#### 12 hours 30 minutes", True),
        ("12 hours 30 minutes", "#### 12 hours 45 minutes", False),
        ("2xy", "#### 2xy", True),
        (r"2\sin x", r"#### 2\sin x", True),
        (r"10\text{ cm}", r"#### 10\text{ cm}", True),
    ],
)
def test_math_reads_answers_as_gsm8k_writes_them(pair, answer, text, correct):
    """Rows 59, 61 and 62: whatever is said behind it, however far; with its sign, and not out of a thought."""
    verify = make_verifier(RewardConfig(verifier="math", answer_marker="####"), {})
    assert verify(*pair(answer, text)).correct is correct


@pytest.mark.parametrize("verifier", ["task", "math", "exact"])
@pytest.mark.parametrize("text", ["<think>#42", "<think>a</think><think>#42", "a <think> b #42 \\boxed{42}"])
def test_an_unfinished_thought_is_no_answer(verifiers, pair, verifier, text):
    """Row 59, for every verifier that looks for an answer."""
    assert verifiers[verifier](*pair("42", text)) == WRONG


def test_math_searches_the_whole_response_without_a_marker(pair):
    verify = make_verifier(RewardConfig(verifier="math", answer_marker=""), {})
    assert verify(*pair("5", "so the answer is 5.")) == RIGHT
    assert verify(*pair("5", "so the answer is 6.")) == WRONG
    assert verify(*pair("5", "so the answer is 5", FinishReason.LENGTH)) == WRONG


def test_math_works_outside_the_main_thread(verifiers, pair):
    """Row 54: math-verify's own time-outs raise there, and a swallowed error made every reward 0."""
    found = []
    thread = threading.Thread(target=lambda: found.append(verifiers["math"](*pair("12", r"\boxed{12}"))))
    thread.start()
    thread.join(timeout=120)
    assert found == [RIGHT]


def test_an_unreadable_reference_is_an_error_not_a_wrong_answer(verifiers, pair):
    with pytest.raises(ValueError, match="cannot read the reference answer"):
        verifiers["math"](*pair(r"\frac{", "#12"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"verifier": "gut feeling"}, "Input should be"),
        ({"verifier": "function"}, "needs reward.function"),
        ({"verifier": "http"}, "needs reward.http.url"),
        ({"verifier": "function", "function": "no_dots"}, "should match pattern"),
        ({"http": {"url": "ftp://x"}}, "should match pattern"),
    ],
)
def test_what_a_verifier_needs_is_asked_for_at_once(wrong, said):
    with pytest.raises(ValidationError, match=said):
        RewardConfig.model_validate(wrong)
