"""Verifiers by name, each one small function (prompt, rollout) -> Reward.

They run inside the pool's worker processes (`services.reward.worker`), which kill what hangs and turn what raises into
`Reward(error=...)`: a verifier just raises. A missing answer is a wrong answer, a failing verifier is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from services.config.reward import RewardConfig
from services.core.types import FinishReason, Prompt, Reward, Rollout
from services.reward.custom import by_function, by_http, load_function
from services.reward.extract import after_thinking, final_answer, last_boxed, without_words
from services.reward.sandbox import by_tests, last_block

Verifier = Callable[[Prompt, Rollout], Reward]
TaskParams = tuple[tuple[str, Any], ...]

SOONER = 0.9  # than the pool, which would kill the process that waits, and could not say what for
NO_ANSWER = Reward(value=0.0, correct=False)


def make_verifier(config: RewardConfig, params: Mapping[str, Mapping[str, Any]]) -> Verifier:
    """The configured verifier; `params` are reasoning-gym parameters by task, for scorers that depend on them.

    Loads what the verifier needs, so that the import is not on the clock of the first answer. Raises ConfigError for a
    function that cannot be loaded.
    """
    name, marker, timeout_s = config.verifier, config.answer_marker, SOONER * config.timeout_s
    if name == "exact":
        return partial(exact, marker=marker)
    if name == "math":
        _load_math()
        return partial(math, marker=marker)
    if name == "task":
        frozen = {task: tuple(sorted(given.items())) for task, given in params.items()}
        for known, given in frozen.items():
            _scorer(known, given)
        return partial(task, marker=marker, params=frozen)
    if name == "function":
        assert config.function is not None
        return partial(by_function, function=load_function(config.function))
    if name == "http":
        assert config.http is not None
        return partial(by_http, url=config.http.url, token_env=config.http.token_env, timeout_s=timeout_s)
    assert name == "code"
    return partial(by_tests, limits=config.sandbox, timeout_s=timeout_s)


def exact(prompt: Prompt, rollout: Rollout, *, marker: str) -> Reward:
    """1 when the answer text equals the prompt's, surrounding space aside."""
    answer = final_answer(rollout.text, marker, _finished(rollout))
    return _graded(answer is not None and answer == prompt.answer.strip())


def task(prompt: Prompt, rollout: Rollout, *, marker: str, params: Mapping[str, TaskParams]) -> Reward:
    """reasoning-gym's own score of the prompt's task, which may be partial; correct only at a full score."""
    answer = final_answer(rollout.text, marker, _finished(rollout))
    if answer is None:
        return NO_ANSWER
    entry = {
        "question": prompt.meta.get("question", prompt.text),
        "answer": prompt.answer,
        "metadata": dict(prompt.meta),
    }
    score = float(_scorer(prompt.task, params.get(prompt.task, ()))(answer, entry))
    return Reward(value=score, correct=score >= 1.0)


def math(prompt: Prompt, rollout: Rollout, *, marker: str) -> Reward:
    r"""1 when math-verify finds the answer equal to the prompt's: the last \boxed{}, else what follows the marker.

    An answer behind a marker may end with its line, and stand in a sentence.
    With marker "" and no box, math-verify looks for the answer in the whole response itself.
    """
    boxed, answer = _math_answer(rollout, marker)
    if answer is None:
        return NO_ANSWER
    gold = _expressions(prompt.answer)
    if all(isinstance(found, str) for found in gold):
        raise ValueError(f"math-verify cannot read the reference answer {prompt.answer!r}")
    if boxed is None and not marker:
        return _graded(_equal(gold, _parse(answer)))
    return _graded(_equal(gold, _expressions(answer if boxed is not None else _without_talk(answer, prompt))))


def _without_talk(answer: str, prompt: Prompt) -> str:
    """Of what follows a marker: behind its line, and in it around the answer, is talk, in which no number counts; but a
    matrix has several lines, and where the reference has words ("12 hours 30 minutes") an answer may have some."""
    line = answer.partition("\n")[0]
    if "\\begin{" in line:
        return answer
    worded = without_words(prompt.answer) != prompt.answer
    return line if worded else without_words(line)


def found_answer(config: RewardConfig, rollout: Rollout) -> str | None:
    """What the verifier judges of a response; None when it finds no answer in it."""
    if config.verifier == "code":
        return last_block(rollout.text)
    if config.verifier == "math":
        return _math_answer(rollout, config.answer_marker)[1]
    return final_answer(rollout.text, config.answer_marker, _finished(rollout))


def _math_answer(rollout: Rollout, marker: str) -> tuple[str | None, str | None]:
    """(what stands in the last box, the answer)."""
    visible = after_thinking(rollout.text)
    boxed = None if visible is None else last_boxed(visible)
    return boxed, boxed if boxed is not None else final_answer(rollout.text, marker, _finished(rollout))


def _finished(rollout: Rollout) -> bool:
    """By finish_reason: the last id says nothing where a model has several stop ids, or stops on a string."""
    return rollout.finish_reason is FinishReason.STOP


def _graded(correct: bool) -> Reward:
    return Reward(value=1.0 if correct else 0.0, correct=correct)


@cache
def _scorer(name: str, params: TaskParams) -> Callable[[str, dict[str, Any]], float]:
    """One scorer per task and process: building some tasks loads word lists."""
    from reasoning_gym.factory import create_dataset

    scorer: Callable[[str, dict[str, Any]], float] = create_dataset(name, **dict(params)).score_answer
    return scorer


def _load_math() -> None:
    import math_verify

    # Each call would warn that its own time-outs are off; the pool keeps time instead.
    for module in ("parser", "grader"):
        logging.getLogger(f"{math_verify.__name__}.{module}").setLevel(logging.ERROR)


def _expressions(text: str) -> list[Any]:
    """`text` read as one answer. math-verify reads LaTeX inside delimiters only; outside them it would pick the 3 out
    of "\\frac{1}{2} + 3", so bare text is the second choice."""
    inside = _parse(f"\\boxed{{{text}}}")
    return inside if any(not isinstance(found, str) for found in inside) else _parse(text)


def _parse(text: str) -> list[Any]:
    """math-verify's time-outs use SIGALRM, which raises in any thread but the main one, and by default it swallows
    errors, which makes a failure look like a wrong answer: both are switched off."""
    from math_verify import parse

    return list(parse(text, parsing_timeout=None, raise_on_error=True))


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
