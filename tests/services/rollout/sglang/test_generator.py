"""SGLang's adapter behind the generator that serves people, over a fake engine that computes for real."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

import pytest

from services.core.errors import RequestError
from services.core.generation import Generation, Increment
from services.core.types import SamplingParams, ServedVersions
from services.rollout.generator import EngineGenerator, ModelWeights
from services.rollout.sglang.engine import SGLangEngine
from tests.services.models.tiny import tensors_of
from tests.services.rollout.engines import check_greedy, letters, ticking
from tests.services.rollout.sglang.fake import FakeHandle, limits_of
from tests.services.rollout.sglang.serving import CHAIN, DRAFTER, MODEL, OTHER, PROMPT

WAIT_S = 120.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
WEIGHTS = ModelWeights(ServedVersions(5, 6), tensors_of(MODEL), DRAFTER)


@contextmanager
def generator(handle: FakeHandle | None = None) -> Iterator[tuple[EngineGenerator, SGLangEngine]]:
    """Without weights over a handle that is given."""
    loaded, handle = handle is None, handle or FakeHandle(MODEL, CHAIN)
    engine = SGLangEngine(handle, limits_of(MODEL, CHAIN), {CHAIN.depth: CHAIN}, letters, ticking())
    made = EngineGenerator(engine, 4, 8, ticking())
    try:
        if loaded:
            asyncio.run(made.swap(WEIGHTS, WAIT_S))
        yield made, engine
    finally:
        made.close()


async def answer(made: EngineGenerator, asked: Generation) -> list[Increment]:
    async with asyncio.timeout(WAIT_S):
        return [news async for news in made.generate(asked)]


def test_streams_swaps_and_stops_at_strings() -> None:
    with generator() as (made, engine):
        news = asyncio.run(answer(made, Generation((PROMPT,), (1, 2), GREEDY, stream=True)))
        first = [t for i in news if i.index == 0 for t in i.token_ids]
        assert len(first) == 12 and {i.versions for i in news} == {ServedVersions(5, 6)}
        check_greedy(MODEL, PROMPT, first)
        stop = letters(first[4:6])
        cut = SamplingParams(temperature=0.0, max_tokens=12, stop_strings=(stop,))
        (whole,) = asyncio.run(answer(made, Generation((PROMPT,), (1,), cut)))
        assert letters(whole.token_ids).find(stop) >= 0 and len(whole.token_ids) <= 6
        asyncio.run(made.swap(ModelWeights(ServedVersions(4, 6), tensors_of(OTHER), DRAFTER), WAIT_S))
        (other,) = asyncio.run(answer(made, Generation((PROMPT,), (1,), GREEDY)))
        assert other.versions == ServedVersions(4, 6)
        check_greedy(OTHER, PROMPT, list(other.token_ids))
        assert engine.num_running == engine.num_waiting == 0


def test_who_goes_away_frees_the_slot() -> None:
    async def leave(made: EngineGenerator) -> None:
        async with aclosing(made.generate(Generation((PROMPT,), (1, 2, 3, 4), GREEDY, stream=True))) as news:
            await anext(news)
        assert len(await answer(made, Generation((PROMPT,), (1, 2, 3, 4), GREEDY))) == 4

    with generator() as (made, _):
        asyncio.run(leave(made))


def test_all_there_is_room_for_is_submitted_at_once() -> None:
    handle = FakeHandle(MODEL, CHAIN)

    async def three(made: EngineGenerator) -> None:
        answers = [asyncio.create_task(answer(made, Generation((PROMPT, (5, n)), (1, 2), GREEDY))) for n in range(3)]
        async with asyncio.timeout(WAIT_S):
            while len(made._waiting) < 3:
                await asyncio.sleep(0.001)
            await made.swap(WEIGHTS, WAIT_S)
            assert [len(found) for found in await asyncio.gather(*answers)] == [2, 2, 2]

    with generator(handle) as (made, _):
        asyncio.run(three(made))
    assert [len(submission) for submission in handle.submissions] == [4, 2], "four run at a time"


def test_filters_that_sglang_cannot_report_are_refused() -> None:
    with generator() as (made, _), pytest.raises(RequestError, match="native engine"):
        asyncio.run(answer(made, Generation((PROMPT,), (1,), SamplingParams(top_p=0.9, max_tokens=12))))
