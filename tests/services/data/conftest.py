"""Prompt files and a tokenizer for the data tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


class ByteTokenizer:
    """One token per UTF-8 byte; opens with one token, or with a chat template's five."""

    unk_token_id: int | None = None

    def render(self, prompt_text: str, chat_template: bool) -> list[int]:
        opening = [256, 257, 258, 259, 260] if chat_template else [256]
        return opening + list(prompt_text.encode("utf-8"))


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


WriteRows = Callable[[Sequence[dict[str, Any]]], Path]


@pytest.fixture(params=["jsonl", "parquet"])
def write_rows(request: pytest.FixtureRequest, tmp_path: Path) -> WriteRows:
    """Writes rows in either format; `meta` goes into Parquet as JSON text, a missing key as null."""

    def write(rows: Sequence[dict[str, Any]]) -> Path:
        path = tmp_path / f"set.{request.param}"
        if request.param == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            return path
        flat = [row | {"meta": json.dumps(row["meta"])} if row.get("meta") else row for row in rows]
        names = ("prompt", "answer", "task", "meta")
        pq.write_table(pa.table({n: pa.array([r.get(n) for r in flat], pa.string()) for n in names}), path)
        return path

    return write
