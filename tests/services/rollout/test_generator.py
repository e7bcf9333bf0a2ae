"""The generator over a real engine: streams, turns away, lets go, and swaps weights between answers only."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from services.core.errors import OverloadedError, RequestError, ServiceLostError, WaitTimeoutError, WeightError
from services.core.generation import Generation, Increment
from services.core.types import Rollout, SamplingParams, ServedVersions
from services.rollout.generator import EngineGenerator, ModelWeights
from services.rollout.native import NativeEngine
from services.rollout.turnover import Turnover
from tests.services.models.tiny import random_drafter, spec_of, tensors_of, tiny_model
from tests.services.rollout.engines import CHAINS, check_greedy, make_engine, ticking

FIRST, SECOND = tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2)
WAIT_S = 120.0  # of a loaded machine
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
LONG = SamplingParams(temperature=0.0, max_tokens=50)


def weights(version: int, model: Any = FIRST) -> ModelWeights:
    return ModelWeights(ServedVersions(version, version + 10), tensors_of(model), random_drafter(spec_of(model)))


def asked(ids: tuple[int, ...] = (1, 2, 3), n: int = 1, sampling: SamplingParams = GREEDY, stream: bool = False) -> Any:
    return Generation((ids,), tuple(range(n)), sampling, stream)


class Held(NativeEngine):
    """Rounds begin when the test lets them: speed decides nothing."""

    gate: Callable[[], None] = staticmethod(lambda: None)

    def step(self, wait_s: float = 0.0) -> list[Rollout]:
        self.gate()
        return super().step(wait_s)


class Rounds:
    """A gate that lets so many rounds pass, and all the others once `over` says so."""

    def __init__(self, count: int, over: Callable[[], bool]) -> None:
        self._left, self._over = count, over

    def __call__(self) -> None:
        self._left -= 1
        end_s = time.monotonic() + WAIT_S
        while self._left < 0 and not self._over():
            assert time.monotonic() < end_s, "the test does not let the round begin"
            time.sleep(0.001)


@contextmanager
def generator(loaded: bool = True, max_waiting: int = 8, rows: int = 4) -> Iterator[tuple[EngineGenerator, Held]]:
    engine = make_engine(FIRST, CHAINS[2], rows=rows, load=False, engine_class=Held)
    assert isinstance(engine, Held)
    made = EngineGenerator(engine, rows, max_waiting, ticking())
    try:
        if loaded:
            asyncio.run(made.swap(weights(1), WAIT_S))
        yield made, engine
    finally:
        made.close()


async def answer(made: EngineGenerator, generation: Generation) -> list[Increment]:
    async with asyncio.timeout(WAIT_S):
        return [news async for news in made.generate(generation)]


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


def run(work: Awaitable[Any]) -> Any:
    return asyncio.run(work)  # type: ignore[arg-type]


def ids_of(news: list[Increment], index: int = 0) -> list[int]:
    return [token for i in news if i.index == index for token in i.token_ids]


def test_streamed_tokens_come_in_parts_and_are_those_of_plain_decoding() -> None:
    with generator() as (made, _):
        whole = run(answer(made, asked(n=2)))
        parts = run(answer(made, asked(n=2, stream=True)))
    assert len(whole) == 2 and len(parts) > 2
    for index in (0, 1):
        assert ids_of(whole, index) == ids_of(parts, index) and len(ids_of(parts, index)) == 20
        ends = [i for i in parts if i.index == index and i.finish_reason]
        assert len(ends) == 1 and ends[0].acceptance is not None
        assert ends[0].acceptance.num_accepted_tokens < 20  # row 5: never more than was told
    check_greedy(FIRST, (1, 2, 3), ids_of(whole))
    assert {i.versions for i in (*whole, *parts)} == {ServedVersions(1, 11)}


def test_many_clients_share_rounds_and_each_gets_its_own() -> None:
    async def all_of(made: EngineGenerator) -> list[list[Increment]]:
        return await asyncio.gather(*(answer(made, asked((1, 2, 3 + k), stream=bool(k % 2))) for k in range(10)))

    with generator(max_waiting=20) as (made, _):
        found = run(all_of(made))
    for k, news in enumerate(found):
        check_greedy(FIRST, (1, 2, 3 + k), ids_of(news))
        assert len(ids_of(news)) == 20


def test_several_prompts_of_one_request_keep_their_places() -> None:
    two = Generation(((1, 2, 3), (4, 5)), (0, 1, 2, 3), GREEDY)
    with generator() as (made, _):
        news = run(answer(made, two))
    assert sorted(i.index for i in news) == [0, 1, 2, 3]
    assert ids_of(news, 0) == ids_of(news, 1) != ids_of(news, 2) == ids_of(news, 3)


def test_who_goes_away_frees_the_slot() -> None:
    async def leave(made: EngineGenerator, engine: Held) -> None:
        gone = threading.Event()
        engine.gate = Rounds(1, gone.is_set)
        async with aclosing(made.generate(asked(n=4, sampling=LONG, stream=True))) as news:
            await anext(news)
            assert engine.num_running == 4
        gone.set()
        assert len(await answer(made, asked(n=4))) == 4  # all rows are free again

    with generator() as (made, engine):
        run(leave(made, engine))
        run(until(lambda: engine.num_running == 0, "the abandoned rows are free"))


def test_too_many_are_turned_away_and_told_when_to_come_back() -> None:
    with generator(max_waiting=2, rows=2) as (made, engine):
        gate = threading.Event()
        engine.gate = lambda: gate.wait(WAIT_S) and None

        async def crowd() -> None:
            first = asyncio.create_task(answer(made, asked(n=2)))
            await until(lambda: engine.num_running + engine.num_waiting == 2, "both run")
            second = asyncio.create_task(answer(made, asked(n=2)))
            await asyncio.sleep(0.05)
            third = asyncio.create_task(answer(made, asked(n=1)))
            await asyncio.sleep(0.05)
            gate.set()
            with pytest.raises(OverloadedError) as refused:
                await third
            assert refused.value.retry_after_s >= 1
            assert len(await first) == len(await second) == 2

        run(crowd())


def test_what_can_never_be_served_is_refused_at_once() -> None:
    with generator() as (made, _):
        for bad in (asked((1, 99)), asked(n=5), asked(sampling=SamplingParams(max_tokens=1000))):
            with pytest.raises(RequestError):
                run(answer(made, bad))
        assert len(run(answer(made, asked()))) == 1


def test_a_swap_waits_for_what_runs_and_no_answer_has_two_versions() -> None:
    async def swapped(made: EngineGenerator) -> tuple[list[Increment], ...]:
        async with aclosing(made.generate(asked(sampling=LONG, stream=True))) as running:
            news = [await anext(running)]
            swap = asyncio.create_task(made.swap(weights(2, SECOND), WAIT_S))
            await asyncio.sleep(0)
            later = asyncio.create_task(answer(made, asked()))
            news += [i async for i in running]
        await swap
        return news, await later, await answer(made, asked())

    with generator() as (made, _):
        before, later, after = run(swapped(made))
    assert {i.versions for i in before} == {ServedVersions(1, 11)}
    check_greedy(FIRST, (1, 2, 3), ids_of(before))
    assert {i.versions for i in (*later, *after)} == {ServedVersions(2, 12)}
    check_greedy(SECOND, (1, 2, 3), ids_of(later))


def test_going_back_to_an_earlier_version_is_a_swap_like_any_other() -> None:
    with generator() as (made, _):
        for version, model in ((2, SECOND), (1, FIRST)):
            run(made.swap(weights(version, model), WAIT_S))
        news = run(answer(made, asked()))
    assert news[0].versions == ServedVersions(1, 11)
    check_greedy(FIRST, (1, 2, 3), ids_of(news))


def test_row_30_weights_that_do_not_fit_leave_what_was_served() -> None:
    renamed = {f"x.{name}": tensor for name, tensor in tensors_of(SECOND).items()}
    wide = spec_of(tiny_model("qwen3", hidden_size=64))
    for bad in (
        ModelWeights(ServedVersions(2, 12), renamed, random_drafter(spec_of(SECOND))),
        ModelWeights(ServedVersions(2, 12), tensors_of(SECOND), random_drafter(wide)),
        ModelWeights(ServedVersions(2, None), tensors_of(SECOND)),
    ):
        with generator() as (made, _):
            before = ids_of(run(answer(made, asked())))
            with pytest.raises(WeightError):
                run(made.swap(bad, WAIT_S))
            news = run(answer(made, asked()))
            assert news[0].versions == made.versions == ServedVersions(1, 11)
            assert ids_of(news) == before


def test_a_swap_that_waits_too_long_is_given_up() -> None:
    with generator() as (made, engine):
        gate = threading.Event()
        engine.gate = lambda: gate.wait(WAIT_S) and None

        async def impatient() -> None:
            running = asyncio.create_task(answer(made, asked()))
            await until(lambda: engine.num_waiting + engine.num_running == 1, "it was submitted")
            with pytest.raises(WaitTimeoutError, match="not loaded"):
                await made.swap(weights(2, SECOND), 0.05)
            gate.set()
            assert (await running)[0].versions.policy == 1

        run(impatient())
        assert run(answer(made, asked()))[0].versions.policy == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_is_told_to_everybody() -> None:
    def fail() -> None:
        raise MemoryError("of this test")

    with generator() as (made, engine):
        engine.gate = fail
        with pytest.raises(ServiceLostError, match="of this test"):
            run(answer(made, asked()))
        with pytest.raises(ServiceLostError):
            run(answer(made, asked()))
        with pytest.raises(ServiceLostError):
            made.check()


def test_requests_wait_for_the_first_weights() -> None:
    async def early(made: EngineGenerator) -> list[Increment]:
        waiting = asyncio.create_task(answer(made, asked()))
        await asyncio.sleep(0.05)
        await made.swap(weights(3), WAIT_S)
        return await waiting

    with generator(loaded=False) as (made, _):
        assert made.versions == ServedVersions(None, None)
        assert run(early(made))[0].versions.policy == 3


def test_closing_ends_what_runs() -> None:
    async def closed(made: EngineGenerator, engine: Held) -> None:
        engine.gate = Rounds(1, lambda: made._closing)
        async with aclosing(made.generate(asked(sampling=LONG, stream=True))) as news:
            await anext(news)
            await asyncio.to_thread(made.close)
            with pytest.raises(ServiceLostError, match="closed"):
                while True:
                    await anext(news)

    with generator() as (made, engine):
        run(closed(made, engine))


def test_how_long_to_stay_away_follows_the_pace() -> None:
    times = iter((1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0))
    turnover = Turnover(lambda: next(times))
    assert turnover.retry_after_s(100) == 1  # nothing is known yet
    for _ in range(4):
        turnover.note()
    assert turnover.retry_after_s(0) == 1
    assert turnover.retry_after_s(12) == 9  # four in three seconds
    assert turnover.retry_after_s(10_000) == 60
