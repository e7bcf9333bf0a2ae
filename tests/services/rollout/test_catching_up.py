"""Switching speculation on for requests under way: in portions, losslessly, and never for the wrong row."""

from __future__ import annotations

import torch

from services.core.types import SamplingParams
from services.rollout.eagle import CATCH_UP_CHUNK, NEAR, runs
from services.rollout.native import NativeEngine
from services.speculation.strategy import OFF
from tests.services.models.tiny import in_float64, markov_model, perfect_drafter, random_drafter, spec_of, tiny_model
from tests.services.rollout.engines import (
    CHAINS,
    HYBRID,
    TREES,
    Switching,
    check_greedy,
    draft_now,
    group,
    make_engine,
)
from tests.services.rollout.test_eagle import TOLERANCE, plain_logits
from tests.services.rollout.test_rollback import check_rows

VOCAB = 32
ON = CHAINS[2]


def long_prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 * n + n * n + salt) % VOCAB for n in range(length))


def engine_with(lengths: list[int], selector=OFF, max_tokens: int = 4000, drafter=None, model=None) -> NativeEngine:
    model = model or tiny_model("llama", VOCAB, 2, 1.0)
    engine = make_engine(model, selector, drafter or random_drafter(spec_of(model), 1.5), max_len=5000)
    engine.submit(
        [
            group(long_prompt(length, n), 1, SamplingParams(max_tokens=max_tokens), first_seed=n)
            for n, length in enumerate(lengths)
        ]
    )
    engine.step()
    return engine


def behind(engine: NativeEngine) -> list[int]:
    return engine._proposer.eagle.missing().tolist()


def test_a_round_brings_the_drafter_forward_by_its_portion_only() -> None:
    engine = engine_with([500, 500, 500])
    engine.force_strategy(ON)
    before = sum(behind(engine))
    engine.step()
    assert before - sum(behind(engine)) <= CATCH_UP_CHUNK < before
    assert engine.last_strategy is OFF, "nobody drafts while most are far behind"


def test_all_draft_in_the_end_and_from_right_states() -> None:
    model = in_float64(tiny_model("llama", VOCAB, 2, 1.0))
    drafter = random_drafter(spec_of(model), 1.5)
    engine = engine_with([140, 120, 80, 100], drafter=drafter, model=model)
    engine.force_strategy(ON)
    drafting = []
    for _ in range(24):
        assert not engine.step()
        drafting.append(sum(n > 0 for n in engine._proposer._drawn))
        check_rows(engine, model, drafter) if drafting[-1] in (2, 3) else None
    assert set(drafting) >= {0, 4} and drafting[-1] == 4 and set(drafting) & {2, 3}, drafting
    check_rows(engine, model, drafter)
    with torch.no_grad():
        draft = draft_now(engine, ON)
        assert draft.probs is not None
        for row, request in enumerate(engine._requests):
            known = [*request.work.prompt.token_ids, *request.response_ids]
            expected = plain_logits(model, drafter, known, []).softmax(-1)
            assert (draft.probs[row, 0] - expected).abs().max() < TOLERANCE


def test_a_request_that_will_not_repay_it_never_drafts_while_its_neighbour_does() -> None:
    model = tiny_model("llama", VOCAB, 2, 1.0)
    engine = make_engine(model, OFF, random_drafter(spec_of(model), 1.5), max_len=5000)
    engine.submit(
        [
            group(long_prompt(600 if n == 0 else 20, n), 1, SamplingParams(max_tokens=budget), first_seed=n)
            for n, budget in enumerate((18, 4000))
        ]
    )
    engine.force_strategy(ON)
    rollouts = []
    while not rollouts:
        rollouts = engine.step()
    (short,) = rollouts
    assert short.acceptance.verify_steps == 0 and len(short.response_ids) == 18
    assert engine.running()[0].acceptance.verify_steps > 5


def test_switching_on_and_off_over_long_contexts_is_plain_decoding() -> None:
    model = markov_model("qwen3", VOCAB, 3, 1.0)
    arms = [OFF, ON, *CHAINS, *TREES, *HYBRID]
    engine = make_engine(model, Switching(arms, seed=5), perfect_drafter(spec_of(model)), max_len=5000)
    sampling, lengths = SamplingParams(temperature=0.0, max_tokens=4000), (150, 3, 240, 60)
    engine.submit([group(long_prompt(length, length), 1 + n % 2, sampling) for n, length in enumerate(lengths)])
    states = set()
    for _ in range(60):
        assert not engine.step()
        states.add(tuple(n > 0 for n in engine._proposer._drawn))
    assert any(True in rows and False in rows for rows in states), "some draft while others are still far behind"
    assert sum(r.acceptance.num_accepted_tokens for r in engine.running()) > 100
    for request in engine._requests:
        check_greedy(model, request.work.prompt.token_ids, request.response_ids)


def test_fed_at_once_all_draft_in_the_first_round() -> None:
    engine = engine_with([500, 3, 420])
    engine.feed_at_once(True)
    engine.force_strategy(ON)
    engine.step()
    assert list(engine._proposer._drawn) == [3, 3, 3]


def test_rows_near_their_end_need_no_portion() -> None:
    engine = engine_with([5, 9, 12])
    assert max(behind(engine)) <= NEAR
    engine.force_strategy(ON)
    engine.step()
    assert list(engine._proposer._drawn) == [3, 3, 3] and max(behind(engine)) <= ON.depth + 1


def test_runs_are_the_neighbours() -> None:
    import numpy as np

    assert list(runs(np.array([True, True, False, True]))) == [(0, 2), (3, 4)]
    assert list(runs(np.array([False, False]))) == [] and list(runs(np.array([True]))) == [(0, 1)]
