from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.core.errors import DataError
from services.data.files import BadRow, check_file, read_file
from services.data.prompts import TokenLimit
from services.models.tokenizer import load_tokenizer

GOOD = {"prompt": "1 + 1=", "answer": "2", "task": "chain_sum", "meta": {"num_terms": 2}}


def good(text: str, **more: Any) -> dict[str, Any]:
    return GOOD | {"prompt": text} | more


def line(row: object) -> bytes:
    return json.dumps(row).encode()


def jsonl(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(raw + b"\n" for raw in lines))
    return path


def reasons(path: Path, tokenizer, limit: int = 100) -> dict[int, str]:
    return {row.line: row.reason for row in check_file(path, tokenizer, limit, chat_template=False).bad}


def test_good_rows_keep_everything(write_rows, tokenizer):
    rows = [good("1 + 1="), {"prompt": "é ☃", "answer": "x"}]
    read = read_file(write_rows(rows), TokenLimit(tokenizer, 100, False), "strict")
    first, second = read.prompts
    assert (first.text, first.answer, first.task, first.meta) == ("1 + 1=", "2", "chain_sum", {"num_terms": 2})
    assert (second.text, second.task, second.meta) == ("é ☃", "default", {})
    assert first.token_ids == tuple(tokenizer.render("1 + 1=", False))


@pytest.mark.parametrize("chat_template", [False, True])
def test_limit_counts_what_rollout_feeds(write_rows, tokenizer, chat_template):
    """Row 79: exactly at the limit is in, one over is out, with the template's own tokens counted."""
    opening = len(tokenizer.render("", chat_template))
    path = write_rows([good("a" * (20 - opening)), good("b" * (21 - opening))])
    result = check_file(path, tokenizer, 20, chat_template)
    assert result.rows == 2
    assert result.bad == (BadRow(2, "prompt has 21 tokens, over the limit of 20"),)
    read = read_file(path, TokenLimit(tokenizer, 20, chat_template), "skip")
    assert [len(p.token_ids) for p in read.prompts] == [20]


def test_bad_values_in_either_format(write_rows, tokenizer):
    rows = [
        good("fine"),
        good("", answer="x"),
        good(" \t\n"),
        GOOD | {"prompt": None},
        good("a1", answer=None),
        good("a2", answer=" "),
        good("a3", task=""),
        good("fine"),
        good("fine", task="other"),
        good("fine too", task=None),
    ]
    assert reasons(write_rows(rows), tokenizer) == {
        2: "prompt is empty",
        3: "prompt is empty",
        4: "prompt is null",
        5: "answer is null",
        6: "answer is empty",
        7: "task is empty",
        8: f"duplicate id {_id(tokenizer, write_rows)}: same task and prompt as line 1",
    }


def _id(tokenizer, write_rows) -> str:
    return read_file(write_rows([good("fine")]), TokenLimit(tokenizer, 100, False), "strict").prompts[0].id


JSONL_FAULTS = [
    (b'{"prompt": "a", "answer": "1"', "bad JSON: Expecting"),
    (b'{"prompt": "a", "answer": "1"} {}', "bad JSON: Extra data"),
    (b'{"prompt": "a", "answer": NaN}', "bad JSON: NaN is not JSON"),
    (b'{"n": ' + b"9" * 5000 + b"}", "bad JSON: Exceeds the limit"),
    (b"[" * 200_000, "bad JSON: nested too deeply"),
    (b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}', "starts with a byte order mark (BOM)"),
    ("\ufeff{}".encode("utf-16-le"), "starts with a UTF-16 byte order mark"),
    (b'{"prompt": "caf\xe9", "answer": "1"}', "invalid UTF-8 at byte 16 of the line"),
    (b"", "empty line"),
    (b"  \r", "empty line"),
    (b'["prompt"]', "not an object but a list"),
    (b'"prompt"', "not an object but a string"),
    (b"null", "not an object but null"),
    (b"7", "not an object but a number"),
    (b"true", "not an object but a boolean"),
    (line({"answer": "1"}), "prompt is missing"),
    (line({"prompt": "a"}), "answer is missing"),
    (line({"prompt": 3, "answer": "1"}), "prompt is not a string but int"),
    (line({"prompt": ["a"], "answer": "1"}), "prompt is not a string but list"),
    (line({"prompt": "a", "answer": 1}), "answer is not a string but int"),
    (line({"prompt": "a", "answer": "1", "task": 1}), "task is not a string but int"),
    (line({"prompt": "a", "answer": "1", "meta": [1]}), "meta is not an object but list"),
    (b'{"prompt": "\\ud800", "answer": "1"}', "prompt holds a lone surrogate"),
]


def test_characters_outside_the_vocabulary_are_told(write_rows):
    """They would reach the model as <unk>, and the run would train on a prompt nobody wrote."""
    path = write_rows([{"prompt": "1 + 2=", "answer": "3"}, {"prompt": "1 \u00d7 2=", "answer": "2"}])
    assert reasons(path, load_tokenizer("pocket")) == {2: "prompt has characters outside the model's vocabulary"}


@pytest.mark.parametrize(("raw", "reason"), JSONL_FAULTS, ids=[reason[:24] for _, reason in JSONL_FAULTS])
def test_each_jsonl_fault_names_its_line(tmp_path, tokenizer, raw, reason):
    path = jsonl(tmp_path / "set.jsonl", line(good("one")), raw, line(good("two")))
    found = reasons(path, tokenizer)
    assert list(found) == [2]
    assert found[2].startswith(reason)
    limit = TokenLimit(tokenizer, 100, False)
    assert [p.text for p in read_file(path, limit, "skip").prompts] == ["one", "two"]
    with pytest.raises(DataError, match="line 2: "):
        read_file(path, limit, "strict")


def test_bom_on_the_first_line_and_crlf_and_no_last_newline(tmp_path, tokenizer):
    body = line(good("one")) + b"\r\n" + line(good("two\u2028still two"))
    path = tmp_path / "set.jsonl"
    path.write_bytes(body)
    assert check_file(path, tokenizer, 100, False).ok
    path.write_bytes(b"\xef\xbb\xbf" + body)
    assert list(reasons(path, tokenizer)) == [1]


def test_parquet_faults_name_their_row(tmp_path, tokenizer):
    path = tmp_path / "set.parquet"
    text = pa.array([b"ok", b"caf\xe9", b"meta", b"list"], pa.binary()).cast(pa.string(), safe=False)
    metas = pa.array([None, None, "{", "[1]"])
    pq.write_table(pa.table({"prompt": text, "answer": ["1"] * 4, "meta": metas}), path)
    found = reasons(path, tokenizer)
    assert found[2] == "invalid UTF-8 in prompt at byte 4"
    assert found[3].startswith("meta holds bad JSON")
    assert found[4] == "meta is not an object but list"


def test_parquet_structs_dictionaries_and_wrong_types(tmp_path, tokenizer):
    path = tmp_path / "set.parquet"
    table = pa.table({"prompt": pa.array(["a", "b"]).dictionary_encode(), "answer": ["1", "2"], "meta": [{"k": 1}] * 2})
    pq.write_table(table, path)
    prompts = read_file(path, TokenLimit(tokenizer, 9, False), "strict").prompts
    assert [(p.text, p.meta) for p in prompts] == [("a", {"k": 1}), ("b", {"k": 1})]
    pq.write_table(pa.table({"prompt": [1, 2], "answer": ["1", "2"]}), path)
    assert reasons(path, tokenizer) == dict.fromkeys((1, 2), "prompt is not a string but int")
    pq.write_table(pa.table({"prompt": pa.array([b"a"], pa.binary()), "answer": ["1"]}), path)
    assert reasons(path, tokenizer) == {1: "prompt is not a string but bytes"}
    pq.write_table(pa.table({"question": ["a"], "answer": ["1"]}), path)
    with pytest.raises(DataError, match="needs 'prompt' and 'answer'"):
        check_file(path, tokenizer, 9, False)


def test_many_row_groups_keep_counting(tmp_path, tokenizer):
    path = tmp_path / "set.parquet"
    texts = [f"p{i}" if i != 9_000 else None for i in range(10_000)]
    pq.write_table(pa.table({"prompt": texts, "answer": ["1"] * len(texts)}), path, row_group_size=700)
    result = check_file(path, tokenizer, 100, False)
    assert (result.rows, result.bad) == (10_000, (BadRow(9_001, "prompt is null"),))


def test_a_duplicate_of_a_bad_row_is_good(write_rows, tokenizer):
    """Otherwise skip mode would lose the prompt altogether."""
    path = write_rows([good("same", answer=None), good("same"), good("same")])
    assert list(reasons(path, tokenizer)) == [1, 3]
    assert len(read_file(path, TokenLimit(tokenizer, 100, False), "skip").prompts) == 1


def test_strict_lists_the_first_twenty_and_counts_the_rest(write_rows, tokenizer):
    path = write_rows([good("fine")] + [good("")] * 30)
    with pytest.raises(DataError) as error:
        read_file(path, TokenLimit(tokenizer, 100, False), "strict")
    message = str(error.value)
    assert "30 of 31 rows are bad" in message
    assert "line 21: " in message
    assert "line 22: " not in message
    assert "and 10 more" in message
    assert "on_bad_row: skip" in message


def test_nothing_usable_is_an_error_in_skip_mode_too(tmp_path, tokenizer):
    limit = TokenLimit(tokenizer, 100, False)
    with pytest.raises(DataError, match="all 1 rows are bad"):
        read_file(jsonl(tmp_path / "bad.jsonl", b"nope"), limit, "skip")
    with pytest.raises(DataError, match="no rows"):
        read_file(jsonl(tmp_path / "empty.jsonl"), limit, "strict")
    assert not check_file(tmp_path / "empty.jsonl", tokenizer, 100, False).ok


def test_unreadable_files_are_data_errors(tmp_path, tokenizer):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is not Parquet")
    for name, match in (("broken.parquet", "cannot be read"), ("gone.jsonl", "not a file"), ("x.csv", "unknown kind")):
        with pytest.raises(DataError, match=match):
            check_file(tmp_path / name, tokenizer, 100, False)
