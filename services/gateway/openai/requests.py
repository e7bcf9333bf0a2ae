"""What clients may ask, after OpenAI's API. A field that OpenAI does not know is refused, as it does; one that it knows
and that is not served here is taken with the value that changes nothing, and refused with any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.openai.errors import NOT_SERVED

# Known to OpenAI, of no meaning here.
IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "parallel_tool_calls", "verbosity", "modalities", "prediction")
)  # fmt: skip
# Known to OpenAI and not served: what changes nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "reasoning_effort": ("none",),
    "audio": (),
    "web_search_options": (),
}


def _sendable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no text") from None
    return text


Text = Annotated[str, AfterValidator(_sendable)]
StopString = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_sendable)]


class Asked(BaseModel):
    """What both kinds of completion have. `top_k` and `min_p` are additions to OpenAI's fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    model: Text
    max_tokens: int | None = Field(None, ge=1, description="Tokens of one answer at most.")
    n: int = Field(1, ge=1, description="Answers to each prompt.")
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=2**31, description="0: off.")
    min_p: float = Field(0.0, ge=0, lt=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """OpenAI's clients may send null for a field that is not set."""
        if not isinstance(data, dict):
            return data
        for name, allowed in NEUTRAL.items():
            if data.get(name) is not None and not any(_same(data[name], value) for value in allowed):
                raise PydanticCustomError(NOT_SERVED, "{field} is not served here: leave it out", {"field": name})
        passed_over = IGNORED | NEUTRAL.keys()
        return {k: v for k, v in data.items() if k not in passed_over and v is not None}

    @field_validator("top_p")
    @classmethod
    def _some_mass(cls, value: float) -> float:
        return max(value, 1e-6)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _same(given: object, allowed: object) -> bool:
    """0 and 0.0 are one value here, 0 and False are not."""
    return isinstance(given, bool) == isinstance(allowed, bool) and given == allowed


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    include_usage: bool = Field(False, description="A last chunk without choices tells it.")
    include_obfuscation: bool = False


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(Asked):
    """`prompt`: a text, several, or token ids in their place. `logprobs` 0: those of the chosen tokens; others are not
    computed."""

    prompt: (
        Text | Annotated[list[Text], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
    )
    logprobs: Literal[0] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]
    name: Text | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Asked):
    """`logprobs`: those of the chosen tokens; others are not computed, so `top_logprobs` is 0."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of `max_tokens`.")
    logprobs: bool = False
    top_logprobs: Literal[0] = 0
