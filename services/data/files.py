"""Prompt sets on disk, checked row by row: JSONL or Parquet with columns prompt, answer, task (optional) and meta
(optional, free). One reader serves `longtail data check` and the run, so what passes the check starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.core.errors import DataError
from services.core.types import Prompt
from services.data.prompts import Problem, PromptTokenizer, TokenLimit
from services.data.rows import Row, read_rows

BAD_ROWS_SHOWN = 20
DEFAULT_TASK = "default"


@dataclass(frozen=True, slots=True)
class BadRow:
    """`line` counts from 1; in Parquet it is the row."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What `longtail data check` found. `rows` counts all rows, good and bad."""

    rows: int
    bad: tuple[BadRow, ...]

    @property
    def ok(self) -> bool:
        return self.rows > 0 and not self.bad


@dataclass(frozen=True, slots=True)
class FilePrompts:
    prompts: tuple[Prompt, ...]
    bad: tuple[BadRow, ...]


def check_file(
    path: str | Path, tokenizer: PromptTokenizer, max_prompt_tokens: int, chat_template: bool
) -> CheckResult:
    """Every bad row of a prompt set with its line and reason; raises DataError when the file cannot be read at all."""
    read = _read(Path(path), TokenLimit(tokenizer, max_prompt_tokens, chat_template))
    return CheckResult(len(read.prompts) + len(read.bad), read.bad)


def read_file(path: Path, limit: TokenLimit, on_bad_row: Literal["strict", "skip"]) -> FilePrompts:
    """The good prompts of a file. Raises DataError when there is none and, if strict, when any row is bad."""
    read = _read(path, limit)
    if read.bad and on_bad_row == "strict":
        raise DataError(
            f"{path}: {len(read.bad)} of {len(read.prompts) + len(read.bad)} rows are bad:\n{describe(read.bad)}\n"
            "Fix them, or set data.source.on_bad_row: skip to leave them out."
        )
    if not read.prompts:
        found = f"all {len(read.bad)} rows are bad:\n{describe(read.bad)}" if read.bad else "the file has no rows"
        raise DataError(f"{path} holds no usable prompt: {found}")
    return read


def describe(bad: tuple[BadRow, ...]) -> str:
    """One line per bad row, the first 20, then how many more."""
    lines = [f"  {row}" for row in bad[:BAD_ROWS_SHOWN]]
    if len(bad) > BAD_ROWS_SHOWN:
        lines.append(f"  and {len(bad) - BAD_ROWS_SHOWN} more")
    return "\n".join(lines)


def _read(path: Path, limit: TokenLimit) -> FilePrompts:
    prompts: list[Prompt] = []
    bad: list[BadRow] = []
    for line, outcome in _outcomes(path, limit):
        if isinstance(outcome, Prompt):
            prompts.append(outcome)
        else:
            bad.append(BadRow(line, outcome))
    return FilePrompts(tuple(prompts), tuple(bad))


def _outcomes(path: Path, limit: TokenLimit) -> Iterator[tuple[int, Prompt | str]]:
    """A prompt or a reason per row. A row duplicates only a *good* earlier one, so that skipping loses no prompt."""
    first_line: dict[str, int] = {}
    for line, row in read_rows(path):
        problem = _problem(row)
        outcome = limit.prompt(problem) if isinstance(problem, Problem) else problem
        if isinstance(outcome, Prompt) and first_line.setdefault(outcome.id, line) != line:
            outcome = f"duplicate id {outcome.id}: same task and prompt as line {first_line[outcome.id]}"
        yield line, outcome


def _problem(row: Row) -> Problem | str:
    if isinstance(row, str):
        return row
    reason = _text_fault(row, "prompt") or _text_fault(row, "answer")
    if reason is None and row.get("task") is not None:
        reason = _text_fault(row, "task")
    meta = row.get("meta")
    if reason is None and not isinstance(meta, dict | None):
        reason = f"meta is not an object but {type(meta).__name__}"
    if reason is not None:
        return reason
    return Problem(row["prompt"], row["answer"], row.get("task") or DEFAULT_TASK, meta or {})


def _text_fault(row: dict[str, Any], name: str) -> str | None:
    if name not in row:
        return f"{name} is missing"
    value = row[name]
    if value is None:
        return f"{name} is null"
    if not isinstance(value, str):
        return f"{name} is not a string but {type(value).__name__}"
    if not value.strip():
        return f"{name} is empty"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # JSON may escape half a surrogate pair, which no tokenizer takes
        return f"{name} holds a lone surrogate, which is not valid Unicode"
    return None
