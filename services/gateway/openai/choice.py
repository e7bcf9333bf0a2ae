"""One choice of an answer while its tokens come, and how chats and completions show it."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import BaseModel

from services.core.acceptance import AcceptanceStats
from services.core.generation import Increment
from services.core.types import FinishReason
from services.gateway.openai.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishedBy,
    TokenLogprob,
    Usage,
)
from services.gateway.openai.text import TextCodec, TextStream


@dataclass(frozen=True)
class Head:
    """What all parts of one answer have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def as_dict(self) -> dict[str, str | int]:
        return {"id": self.id, "created": self.created, "model": self.model,
                "system_fingerprint": self.system_fingerprint}  # fmt: skip


@dataclass(frozen=True)
class Token:
    """A token that is part of the text. `offset`: characters before it."""

    data: bytes
    logprob: float
    offset: int

    @property
    def shown(self) -> str:
        """A part of a character as OpenAI writes it."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


@dataclass
class Choice:
    index: int
    codec: TextCodec
    text: TextStream
    stop_token_ids: Collection[int]
    finish_reason: FinishedBy | None = None
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    _characters: int = 0

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def begun(self) -> bool:
        return bool(self.text.ids)

    def take(self, news: Increment) -> tuple[str, list[Token]]:
        """What is new: text that may be shown, and tokens. The two meet at the end only, since text is held back."""
        assert self.finish_reason is None, "an answer that has ended goes on"
        shown = self.text.push(news.token_ids)
        tokens = [t for i, p in zip(news.token_ids, news.logprobs, strict=True) if (t := self._token(i, p))]
        if news.finish_reason is not None:
            self.finish_reason = "length" if news.finish_reason is FinishReason.LENGTH else "stop"
            self.acceptance = news.acceptance or AcceptanceStats()
            shown += self.text.finish()
        return shown, tokens

    def _token(self, token_id: int, logprob: float) -> Token | None:
        """None for the one that ends a response: it is no text."""
        if token_id in self.stop_token_ids:
            return None
        data, offset = self.codec.token_bytes(token_id), self._characters
        self._characters += len(self._decoder.decode(data))
        return Token(data, logprob, offset)


@dataclass(frozen=True)
class Ended:
    """A choice as a whole."""

    index: int
    text: str
    tokens: Sequence[Token]
    finish_reason: FinishedBy


class Style(Protocol):
    """How an answer looks. `logprobs`: whether the client asked for them; `prefix` of ids."""

    @property
    def logprobs(self) -> bool: ...

    @property
    def prefix(self) -> str: ...

    def whole(self, head: Head, choices: Sequence[Ended], usage: Usage) -> BaseModel: ...

    def opening(self, head: Head, index: int) -> BaseModel | None:
        """A chunk before the first one of a choice."""

    def more(self, head: Head, index: int, text: str, tokens: Sequence[Token]) -> BaseModel: ...

    def end(self, head: Head, index: int, reason: FinishedBy) -> BaseModel: ...

    def usage(self, head: Head, usage: Usage) -> BaseModel: ...


@dataclass(frozen=True)
class CompletionStyle:
    logprobs: bool
    prefix: str = "cmpl"

    def whole(self, head: Head, choices: Sequence[Ended], usage: Usage) -> Completion:
        shown = [
            CompletionChoice(index=c.index, text=c.text, logprobs=self._shown(c.tokens), finish_reason=c.finish_reason)
            for c in choices
        ]
        return Completion(**head.as_dict(), choices=shown, usage=usage)

    def opening(self, head: Head, index: int) -> None:
        return None

    def more(self, head: Head, index: int, text: str, tokens: Sequence[Token]) -> Completion:
        return self._chunk(
            head, CompletionChoice(index=index, text=text, logprobs=self._shown(tokens), finish_reason=None)
        )

    def end(self, head: Head, index: int, reason: FinishedBy) -> Completion:
        return self._chunk(head, CompletionChoice(index=index, text="", finish_reason=reason))

    def usage(self, head: Head, usage: Usage) -> Completion:
        return Completion(**head.as_dict(), choices=[], usage=usage)

    @staticmethod
    def _chunk(head: Head, choice: CompletionChoice) -> Completion:
        return Completion(**head.as_dict(), choices=[choice])

    def _shown(self, tokens: Sequence[Token]) -> CompletionLogprobs | None:
        if not self.logprobs:
            return None
        return CompletionLogprobs(
            tokens=[t.shown for t in tokens],
            token_logprobs=[t.logprob for t in tokens],
            text_offset=[t.offset for t in tokens],
        )


@dataclass(frozen=True)
class ChatStyle:
    logprobs: bool
    prefix: str = "chatcmpl"

    def whole(self, head: Head, choices: Sequence[Ended], usage: Usage) -> ChatCompletion:
        shown = [
            ChatChoice(
                index=c.index, message=ChatMessage(content=c.text), logprobs=self._shown(c.tokens),
                finish_reason=c.finish_reason,
            )
            for c in choices
        ]  # fmt: skip
        return ChatCompletion(**head.as_dict(), choices=shown, usage=usage)

    def opening(self, head: Head, index: int) -> ChatChunk:
        return self._chunk(head, ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")))

    def more(self, head: Head, index: int, text: str, tokens: Sequence[Token]) -> ChatChunk:
        delta = ChatDelta(content=text)
        return self._chunk(head, ChatChunkChoice(index=index, delta=delta, logprobs=self._shown(tokens)))

    def end(self, head: Head, index: int, reason: FinishedBy) -> ChatChunk:
        return self._chunk(head, ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason))

    def usage(self, head: Head, usage: Usage) -> ChatChunk:
        return ChatChunk(**head.as_dict(), choices=[], usage=usage)

    @staticmethod
    def _chunk(head: Head, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**head.as_dict(), choices=[choice])

    def _shown(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if not self.logprobs:
            return None
        content = [TokenLogprob(token=t.shown, logprob=t.logprob, bytes=list(t.data)) for t in tokens]
        return ChatLogprobs(content=content)
