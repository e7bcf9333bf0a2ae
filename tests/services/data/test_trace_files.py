from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import DataError
from services.data.split import is_heldout
from services.data.trace_files import Trace, TraceRules, read_traces


class Letters:
    """One id per character, code point + 10; a rendered text begins with 1, a rendered chat with 2 and ends with 3."""

    eos_token_id = 2  # also what opens a chat: nothing may go by the id
    unk_token_id = ord("?") + 10

    def render(self, prompt_text: str, chat_template: bool) -> list[int]:
        return [2, *self.encode(prompt_text), 3] if chat_template else [1, *self.encode(prompt_text)]

    def encode(self, text: str) -> list[int]:
        return [ord(c) + 10 for c in text]


def written(folder: Path, *rows: Any) -> Path:
    file = folder / "traces.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return file


def rules(chat: bool = False, most: int = 30) -> TraceRules:
    return TraceRules(Letters(), chat, most)


def ids(text: str) -> list[int]:
    return Letters().encode(text)


def test_a_response_is_learnt_and_its_prompt_is_not(tmp_path: Path) -> None:
    file = written(tmp_path, {"prompt": "ab", "response": "cd"}, {"text": "xyz"})
    plain = read_traces(file, rules(), 1e-9).train
    assert plain == (Trace((1, *ids("ab"), *ids("cd"), 2), 3), Trace((1, *ids("xyz"), 2), 1))
    chat = read_traces(file, rules(chat=True), 1e-9).train
    assert chat == (Trace((2, *ids("ab"), 3, *ids("cd"), 2), 4), plain[1])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("", "empty line"),
        ("{", "bad JSON"),
        ("[1]", "not an object"),
        ({"prompt": "a"}, "this one has prompt"),
        ({"question": "a"}, "none of them"),
        ({"prompt": "a", "response": "b", "text": "c"}, "prompt, response, text"),
        ({"prompt": "a", "response": ""}, "response must be a text that is not empty"),
        ({"prompt": None, "response": "a"}, "prompt must be a text"),
        ({"text": 3}, "text must be a text"),
        ({"text": "what?"}, "outside the model's vocabulary"),
        ({"prompt": "a", "response": "b" * 28}, "31 tokens: shorten it to 30, or raise rollout.engine.max_len"),
        ('{"text": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_a_bad_row_is_named_with_line_and_remedy(tmp_path: Path, row: Any, told: str) -> None:
    file = written(tmp_path, {"text": "good"}, row, {"text": "good too"})
    with pytest.raises(DataError, match=r"1 of 3 rows are bad") as error:
        read_traces(file, rules(), 1e-9)
    assert "line 2: " in str(error.value) and told in str(error.value)


def test_the_longest_trace_that_fits_is_taken(tmp_path: Path) -> None:
    file = written(tmp_path, {"prompt": "a", "response": "b" * 27})
    assert len(read_traces(file, rules(), 1e-9).train[0].ids) == 30


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"30 of 31 rows are bad(.|\n)*and 10 more"):
        read_traces(written(tmp_path, {"text": "good"}, *["{"] * 30), rules(), 1e-9)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="add rows"):
        read_traces(written(tmp_path), rules(), 0.1)
    for name in ("none.jsonl", "traces.csv"):
        with pytest.raises(DataError, match=r"warmup\.traces"):
            read_traces(tmp_path / name, rules(), 0.1)


@given(st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=20, unique=True))
def test_held_out_prompts_are_those_of_a_run(tmp_path_factory: pytest.TempPathFactory, prompts: list[str]) -> None:
    file = written(tmp_path_factory.mktemp("traces"), *({"prompt": p, "response": "a"} for p in prompts))
    expected = [sum(is_heldout(p, 0.4) == side for p in prompts) for side in (False, True)]
    if not expected[0]:
        with pytest.raises(DataError, match="add rows"):
            read_traces(file, rules(), 0.4)
        return
    sets = read_traces(file, rules(), 0.4)
    assert [len(sets.train), len(sets.heldout)] == expected
