"""A stream over a server that is lost, at every place of the answer: one outcome, never an error behind the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import ServiceLostError
from services.core.generation import Generation, Increment
from services.core.types import AcceptanceStats, FinishReason, SamplingParams, ServedVersions
from services.gateway.openai.answering import Answering
from services.gateway.openai.choice import CompletionStyle, Head
from services.models.tokenizer import Tokenizer
from tests.services.models.test_tokenizer import byte_tokenizer

CODEC = Tokenizer(byte_tokenizer(), Path(), (256,))
VERSIONS = ServedVersions(1, 0)


def increment(index: int, text: str, end: bool) -> Increment:
    ids = tuple(CODEC.encode(text))
    ending = (FinishReason.LENGTH, AcceptanceStats()) if end else (None, None)
    return Increment(index, ids, (-0.5,) * len(ids), VERSIONS, *ending)


def streamed(choices: int, told: int | None, usage: bool) -> list[Any]:
    """What a client sees of an answer whose server is lost behind `told` increments; None: it is not."""
    news = [increment(i, text, text == "c") for text in "abc" for i in range(choices)]

    async def generated() -> AsyncGenerator[Increment, None]:
        for one in news[1:told]:
            yield one
        if told is not None:
            raise ServiceLostError("the model server", "its process died")

    asked = Generation(((1,),), tuple(range(choices)), SamplingParams(max_tokens=3), stream=True)
    answering = Answering(asked, CODEC, CompletionStyle(False), lambda made_by: Head("x", 0, "m", made_by))

    async def collect() -> list[bytes]:
        deadline_s = asyncio.get_running_loop().time() + 20
        return [e async for e in answering.events(news[0], generated(), usage, deadline_s)]

    lines = [event.decode().removeprefix("data: ").strip() for event in asyncio.run(collect())]
    return ["[DONE]" if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("choices", [1, 2, 3])
def test_a_lost_server_is_an_error_until_the_answer_is_whole(choices: int, usage: bool) -> None:
    whole = streamed(choices, None, usage)
    assert whole[-1] == "[DONE]" and not any("error" in e for e in whole[:-1])
    for told in range(1, 3 * choices):
        events = streamed(choices, told, usage)
        assert "its process died" in events[-1]["error"]["message"] and "[DONE]" not in events
        assert not any("error" in e for e in events[:-1])
    assert streamed(choices, 3 * choices, usage) == whole, "all was told: what made it may go"
