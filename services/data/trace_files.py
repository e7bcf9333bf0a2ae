"""Worked traces of a user for supervised warm-up: JSONL whose rows hold {"prompt", "response"} or {"text"}.

A prompt becomes the ids that rollout would feed, and its response is encoded by itself, as it is generated: so the
model learns on the very boundary at which it will be sampled. Of a text everything is learnt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.core.errors import DataError
from services.data.files import BadRow, describe
from services.data.rows import Row, read_rows
from services.data.split import is_heldout


class TraceTokenizer(Protocol):
    """The part of `services.models.tokenizer.Tokenizer` that traces need."""

    eos_token_id: int

    def render(self, prompt_text: str, chat_template: bool) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    @property
    def unk_token_id(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Trace:
    """`ids` end with the end of sequence; the first `prompt_len` (at least one, which nothing predicts) are not
    learnt."""

    ids: tuple[int, ...]
    prompt_len: int


@dataclass(frozen=True, slots=True)
class TraceSets:
    """`heldout` may be empty; a prompt or text falls on the same side as it does among a run's prompts."""

    train: tuple[Trace, ...]
    heldout: tuple[Trace, ...]


@dataclass(frozen=True, slots=True)
class TraceRules:
    """How rows become ids; `max_tokens` bounds prompt and response together."""

    tokenizer: TraceTokenizer
    chat_template: bool
    max_tokens: int

    def trace(self, prompt: str | None, response: str) -> Trace | str:
        """The trace, or why there is none. Without a prompt `response` is a text."""
        tokenizer = self.tokenizer
        if prompt is None:
            ids, prompt_len = tokenizer.render(response, False), 1
        else:
            opening = tokenizer.render(prompt, self.chat_template)
            ids, prompt_len = [*opening, *tokenizer.encode(response)], len(opening)
        if not prompt_len:
            return "the prompt has no tokens: write one, or use a text row"
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            return "it has characters outside the model's vocabulary: take them out"
        if len(ids) + 1 > self.max_tokens:
            return f"it has {len(ids) + 1} tokens: shorten it to {self.max_tokens}, or raise rollout.engine.max_len"
        return Trace((*ids, tokenizer.eos_token_id), prompt_len)


def read_traces(path: Path, rules: TraceRules, heldout_fraction: float) -> TraceSets:
    """All rows of the file. Raises DataError, with line and remedy of the bad rows, when one cannot be learnt from."""
    if path.suffix.lower() not in (".jsonl", ".ndjson") or not path.is_file():
        raise DataError(f"{path} is not a JSONL file: check warmup.traces")
    train: list[Trace] = []
    heldout: list[Trace] = []
    bad: list[BadRow] = []
    for line, key, outcome in _outcomes(path, rules):
        if isinstance(outcome, str):
            bad.append(BadRow(line, outcome))
        else:
            (heldout if is_heldout(key, heldout_fraction) else train).append(outcome)
    if bad:
        raise DataError(
            f"{path}: {len(bad)} of {len(train) + len(heldout) + len(bad)} rows are bad:\n{describe(tuple(bad))}"
        )
    if not train:
        raise DataError(f"{path} leaves no row to train on with data.heldout_fraction {heldout_fraction}: add rows")
    return TraceSets(tuple(train), tuple(heldout))


def _outcomes(path: Path, rules: TraceRules) -> Iterator[tuple[int, str, Trace | str]]:
    """(line, what decides the side, trace or reason)."""
    for line, row in read_rows(path):
        parts = _parts(row)
        if isinstance(parts, str):
            yield line, "", parts
        else:
            prompt, response = parts
            yield line, response if prompt is None else prompt, rules.trace(prompt, response)


def _parts(row: Row) -> tuple[str | None, str] | str:
    """(prompt, response), with None and the text for a text row; or the reason why there is neither."""
    if isinstance(row, str):
        return row
    names = {"text", "prompt", "response"} & row.keys()
    if names not in ({"text"}, {"prompt", "response"}):
        found = ", ".join(sorted(names)) or "none of them"
        return f'a row holds "prompt" and "response", or "text" alone, but this one has {found}'
    for name in sorted(names):
        if not isinstance(row[name], str) or not row[name].strip():
            return f"{name} must be a text that is not empty"
        try:
            row[name].encode("utf-8")
        except UnicodeEncodeError:
            return f"{name} holds half a surrogate pair, which is not valid Unicode: write the whole character"
    return (None, row["text"]) if "text" in names else (row["prompt"], row["response"])
