"""From raw problems to `Prompt` records: identity, token ids, length limit. For generated and file prompt sets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.core.types import Prompt


class PromptTokenizer(Protocol):
    """The part of `services.models.tokenizer.Tokenizer` that data needs: rollout calls the same method."""

    def render(self, prompt_text: str, chat_template: bool) -> list[int]: ...

    @property
    def unk_token_id(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt before tokenisation."""

    text: str
    answer: str
    task: str
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return prompt_id(self.task, self.text)


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """How prompts are counted: the ids made here are the ids rollout feeds, so the limit cannot disagree with it."""

    tokenizer: PromptTokenizer
    max_prompt_tokens: int
    chat_template: bool

    def prompt(self, problem: Problem) -> Prompt | str:
        """The finished prompt, or the reason why it cannot be one."""
        ids = tuple(self.tokenizer.render(problem.text, self.chat_template))
        if not ids:
            return "prompt has no tokens"
        unknown = self.tokenizer.unk_token_id
        if unknown is not None and unknown in ids:
            return "prompt has characters outside the model's vocabulary"
        if len(ids) > self.max_prompt_tokens:
            return f"prompt has {len(ids)} tokens, over the limit of {self.max_prompt_tokens}"
        return Prompt(problem.id, problem.text, ids, problem.answer, problem.task, problem.meta)


def prompt_id(task: str, text: str) -> str:
    """16 hex digits of a hash of task and text; the separator keeps ("a", "bc") and ("ab", "c") apart."""
    return hashlib.sha256(f"{len(task)}:{task}{text}".encode()).hexdigest()[:16]
