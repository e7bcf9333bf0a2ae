"""What clients are answered, after OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, Field

from services.core.acceptance import AcceptanceStats

FinishedBy = Literal["stop", "length"]


class TokenDetails(BaseModel):
    """Drafted tokens of the answer that the policy accepted, and those that it threw away."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens of all choices; a prompt counts once, whatever the number of answers to it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: TokenDetails


def usage_of(prompt_tokens: int, completion_tokens: int, parts: Iterable[AcceptanceStats]) -> Usage:
    total = AcceptanceStats.merged(parts)
    accepted = total.num_accepted_tokens
    details = TokenDetails(accepted_prediction_tokens=accepted, rejected_prediction_tokens=total.proposed - accepted)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        completion_tokens_details=details,
    )


class CompletionLogprobs(BaseModel):
    """One entry per token. `text_offset`: characters of the answer before it."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishedBy | None


class Answer(BaseModel):
    """`system_fingerprint` names the versions of policy and drafter that made it."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Completion(Answer):
    """A whole answer, or with `stream` one of its chunks."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenLogprob(BaseModel):
    """`token` of a part of a character is written as its bytes."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[None] = Field(default=[], max_length=0)


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishedBy


class ChatCompletion(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishedBy | None = None


class ChatChunk(Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """The model that is served. `versions`: what a request that came now would be answered by."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "longtail"
    versions: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    status: Literal["ok"] = "ok"
