"""From what a client asks to what the generator is asked: pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from services.core.generation import Generation
from services.core.types import COLDEST, SamplingParams
from services.gateway.openai.errors import FieldError
from services.gateway.openai.requests import Asked, ChatRequest, CompletionRequest
from services.gateway.openai.settings import ServingSettings
from services.gateway.openai.text import TextCodec

COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat answer may take what room there is
DrawSeed = Callable[[], int]


def plan_completion(
    asked: CompletionRequest, codec: TextCodec, settings: ServingSettings, draw_seed: DrawSeed
) -> Generation:
    """Raises FieldError."""
    prompts = [codec.encode_prompt(p) if isinstance(p, str) else p for p in asked.prompts]
    room = _room(prompts, settings)
    wanted = asked.max_tokens if asked.max_tokens is not None else min(COMPLETION_TOKENS, room)
    return _plan(asked, "prompt", prompts, (wanted, room), settings, draw_seed)


def plan_chat(asked: ChatRequest, codec: TextCodec, settings: ServingSettings, draw_seed: DrawSeed) -> Generation:
    """Raises FieldError; DataError without a chat template, and RequestError for messages that it refuses."""
    prompts = [codec.render_messages([{"role": m.role, "content": m.text} for m in asked.messages])]
    room = _room(prompts, settings)
    given = (asked.max_completion_tokens, asked.max_tokens)
    wanted = min((n for n in given if n is not None), default=room)
    return _plan(asked, "messages", prompts, (wanted, room), settings, draw_seed)


def _room(prompts: list[list[int]], settings: ServingSettings) -> int:
    """Tokens that every answer may have."""
    return settings.max_len - max(len(p) for p in prompts)


def _plan(
    asked: Asked,
    field: str,
    prompts: list[list[int]],
    tokens: tuple[int, int],
    settings: ServingSettings,
    draw_seed: DrawSeed,
) -> Generation:
    wanted, room = tokens
    if wanted > room or room < 1:
        raise FieldError(
            field,
            f"the prompt has {settings.max_len - room} tokens and {max(wanted, 1)} were asked for; this model takes "
            f"{settings.max_len} in all: shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
        )
    count = len(prompts) * asked.n
    if count > settings.max_choices:
        raise FieldError("n", f"{count} answers in one request, at most {settings.max_choices}: send several requests")
    base = draw_seed() if asked.seed is None else asked.seed
    return Generation(
        prompts=tuple(tuple(p) for p in prompts),
        seeds=tuple(_seed(base, i) for i in range(count)),
        sampling=_sampling(asked, wanted, settings),
        stream=asked.stream,
    )


def _sampling(asked: Asked, max_tokens: int, settings: ServingSettings) -> SamplingParams:
    return SamplingParams(
        temperature=asked.temperature if asked.temperature >= COLDEST else 0.0,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        max_tokens=max_tokens,
        stop_token_ids=settings.stop_token_ids,
        stop_strings=asked.stop_strings,
    )


def _seed(base: int, index: int) -> int:
    """Choices of one request draw independent numbers, and so do requests with neighbouring seeds."""
    return int.from_bytes(hashlib.blake2b(f"{base}/{index}".encode(), digest_size=6).digest(), "big")
