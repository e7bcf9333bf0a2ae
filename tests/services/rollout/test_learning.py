"""The generator lets a learner work while nobody asks for anything, and only then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from services.core.serving import LearningView
from services.core.types import ServedVersions
from services.models.hidden import HiddenStates
from services.rollout import generator
from services.rollout.generator import EngineGenerator
from services.weights.learning import NewDrafter, Spare
from tests.services.models.tiny import random_drafter, spec_of
from tests.services.rollout.engines import CHAINS, check_greedy, make_engine, ticking
from tests.services.rollout.test_generator import (
    FIRST,
    SECOND,
    WAIT_S,
    Held,
    answer,
    asked,
    ids_of,
    run,
    until,
    weights,
)


class Pupil:
    """A learner whose work the test scripts: `script(n)` is the n-th call's answer."""

    def __init__(self, script: Callable[[int], Spare]) -> None:
        self._script = script
        self.begun: list[tuple[int, int]] = []
        self.taken: list[HiddenStates] = []
        self.calls = 0
        self.closed = False
        self.engine: Held | None = None

    def begin(self, policy_version: int, policy: Mapping[str, Tensor], drafter: NewDrafter) -> None:
        self.begun.append((policy_version, drafter.version))

    def add(self, states: Sequence[HiddenStates]) -> None:
        self.taken += states

    def work(self) -> Spare:
        assert self.engine is not None and not (self.engine.num_running or self.engine.num_waiting), "it is not idle"
        self.calls += 1
        return self._script(self.calls)

    def view(self) -> LearningView:
        return LearningView(micro_steps=self.calls)

    def close(self) -> None:
        self.closed = True


@contextmanager
def learning(pupil: Pupil, rows: int = 4) -> Iterator[EngineGenerator]:
    engine = make_engine(FIRST, CHAINS[2], rows=rows, load=False, engine_class=Held, capture_bytes=2**20)
    assert isinstance(engine, Held)
    pupil.engine = engine
    made = EngineGenerator(engine, rows, 8, ticking(), learner=pupil)
    try:
        run(made.swap(weights(1), WAIT_S))
        yield made
    finally:
        made.close()


def test_a_request_waits_for_the_micro_step_under_way_and_for_no_other() -> None:
    begun, ends = threading.Event(), threading.Event()
    order: list[str] = []

    def script(n: int) -> Spare:
        order.append("work")
        if n == 3:
            begun.set()
            assert ends.wait(WAIT_S)
        return Spare(more=True)

    async def ask(made: EngineGenerator) -> None:
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        asking = asyncio.create_task(answer(made, asked()))
        await until(lambda: bool(made._inbox), "the request is there")
        ends.set()
        await asking

    pupil = Pupil(script)
    with learning(pupil) as made:
        assert pupil.engine is not None
        pupil.engine.gate = lambda: order.append("round")
        run(ask(made))
        first = order.index("round")
        assert order[:first] == ["work"] * 3, "the request came while the third ran"
        rounds = order[first : len(order) - order[::-1].index("round")]
        assert set(rounds) == {"round"}, "no work between the rounds of an answer"


def test_every_answer_is_handed_over_once_with_its_states() -> None:
    pupil = Pupil(lambda n: Spare(more=False))
    with learning(pupil) as made:
        told = [ids_of(run(answer(made, asked((1, 2, 3 + k), stream=bool(k % 2))))) for k in range(3)]
        run(until(lambda: len(pupil.taken) == 3, "all were handed over"))
        assert made.view("x").learning == LearningView(micro_steps=pupil.calls)
    found = {tuple(s.input_ids.tolist()) for s in pupil.taken}
    assert found == {(1, 2, 3 + k, *ids[:-1]) for k, ids in enumerate(told)}
    assert pupil.closed


def test_a_found_drafter_is_served_from_the_next_request_on_and_changes_no_text() -> None:
    better = random_drafter(spec_of(FIRST), seed=9)
    pupil = Pupil(lambda n: Spare(True, NewDrafter(12, better)) if n == 1 else Spare(False))
    with learning(pupil) as made:
        run(until(lambda: made.versions == ServedVersions(1, 12), "it is served"))
        news = run(answer(made, asked()))
        view = made.view("a")
    assert {i.versions for i in news} == {ServedVersions(1, 12)}
    check_greedy(FIRST, (1, 2, 3), ids_of(news))
    assert (view.swaps, view.versions) == (1, ServedVersions(1, 12))
    assert pupil.engine is not None
    loaded = pupil.engine._proposer.eagle._network
    assert loaded is not None and pupil.begun == [(1, 11)], "the learner knows what it found itself"


def test_answers_have_one_version_each_while_drafters_come_all_the_time() -> None:
    drafters = [random_drafter(spec_of(FIRST), seed=n) for n in range(3)]
    pupil = Pupil(lambda n: Spare(True, NewDrafter(11 + n, drafters[n % 3])))

    async def crowd(made: EngineGenerator) -> list[Any]:
        found = []
        for _n in range(4):
            asking = [answer(made, asked((1, 2, 3 + k), stream=bool(k % 2))) for k in range(3)]
            found += await asyncio.gather(*asking)
            before = made.view("a").swaps
            await until(lambda before=before: made.view("a").swaps > before + 1, "the learner found more")
        return found

    with learning(pupil) as made:
        answers = run(crowd(made))
    assert made.view("a").swaps == pupil.calls
    for news in answers:
        assert len({i.versions for i in news}) == 1
    assert len({news[0].versions for news in answers}) >= 4


def test_a_swap_begins_the_learner_anew_and_its_old_answers_are_forgotten() -> None:
    pupil = Pupil(lambda n: Spare(more=False))
    with learning(pupil) as made:
        assert pupil.engine is not None

        async def swap_at_once() -> None:
            asking = asyncio.create_task(answer(made, asked()))
            await asking
            await made.swap(weights(2, SECOND), WAIT_S)

        run(swap_at_once())
        handed = len(pupil.taken)
        run(answer(made, asked((4, 5))))
        run(until(lambda: len(pupil.taken) == handed + 1, "the new one's answer"))
    assert pupil.begun == [(1, 11), (2, 12)]
    assert pupil.taken[-1].input_ids[:2].tolist() == [4, 5]


def test_a_learner_without_memory_is_let_go_and_serving_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator.LOG, "disabled", False)  # libraries that configure logging disable what is there

    def script(n: int) -> Spare:
        raise torch.OutOfMemoryError("of this test")

    pupil = Pupil(script)
    with learning(pupil) as made:
        run(until(lambda: pupil.closed, "it was let go"))
        check_greedy(FIRST, (1, 2, 3), ids_of(run(answer(made, asked()))))
        assert made.view("a").learning is None and pupil.calls == 1
    assert "lower drafter.pack_tokens" in caplog.text
