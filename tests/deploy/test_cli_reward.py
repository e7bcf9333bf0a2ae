from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.__main__ import app


def run(tmp_path: Path, rows: list[Any], *args: str) -> tuple[int, list[str]]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    result = CliRunner().invoke(app, ["reward", "test", str(file), *args])
    return result.exit_code, [line.replace(f"{file}:", "") for line in result.output.splitlines()]


def test_what_each_row_scores_and_why(tmp_path: Path) -> None:
    rows = [
        {"answer": "4", "response": "2+2=#4", "prompt": "2+2="},
        {"answer": "4", "response": "#5"},
        {"answer": "4", "response": "four"},
        {"answer": "4", "response": "<think>#4"},
        {"answer": "4", "response": "#4", "finished": False},
    ]
    assert run(tmp_path, rows, "--set", "reward.verifier=exact") == (
        0,
        [
            "1: 1 correct: found '4', the answer is '4'",
            "2: 0 wrong: found '5', the answer is '4'",
            "3: 0 without an answer: nothing behind the marker '#' (reward.answer_marker)",
            "4: 0 without an answer: the thinking never ends",
            "5: 1 correct: found '4', the answer is '4'",
            "5 rows: 2 correct, 2 without an answer, 1 wrong",
        ],
    )


def test_a_response_that_was_cut_off_has_no_end_to_read(tmp_path: Path) -> None:
    code, lines = run(
        tmp_path, [{"answer": "4", "response": "4", "finished": False}],
        "--set", "reward.verifier=exact", "--set", "reward.answer_marker=''",
    )  # fmt: skip
    assert code == 0 and "the response was cut off" in lines[0]


def test_a_failing_verifier_is_told_apart_from_a_wrong_answer(tmp_path: Path) -> None:
    rows = [{"answer": "4", "response": "#4", "task": "no_such_task"}]
    code, lines = run(tmp_path, rows, "--set", "reward.verifier=task")
    assert code == 1 and "1: 0 error" in lines[0] and "no_such_task" in lines[0]
    assert lines[-1] == "error: 1 of 1 verifications failed: see the lines above"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"response": "#4"}, "1: answer missing: a row needs answer and response"),
        ({"answer": "4"}, "1: response missing"),
        ({"answer": 4, "response": "#4"}, "1: answer must be a str"),
        ({"answer": "4", "response": "#4", "finished": "no"}, "1: finished must be a bool"),
        ({"answer": "4", "response": "#4", "respnse": ""}, "1: unknown key 'respnse'"),
        ("{", "1: bad JSON"),
        ("[1]", "1: not an object but a list"),
    ],
)
def test_rows_that_cannot_be_read_are_all_named_and_nothing_is_scored(tmp_path: Path, row: Any, said: str) -> None:
    good = {"answer": "4", "response": "#4"}
    code, lines = run(tmp_path, [row, good, row])
    assert code != 0 and said in lines[0].removeprefix("error: ") and lines[1].startswith("3: ") and len(lines) == 2
