"""Which drafter a request gets in a round, and that a batch of several is still plain decoding."""

from __future__ import annotations

import pytest

from services.config.speculation import StrategyConfig
from services.core.types import Rollout, SamplingParams
from services.rollout.native import NativeEngine
from services.speculation.round import RoundOutcome
from services.speculation.selector import Fixed
from services.speculation.strategy import draft_strategy
from services.speculation.suffix_index import SuffixIndex
from tests.services.models.tiny import (
    FAMILIES,
    contrary_drafter,
    markov_model,
    perfect_drafter,
    random_drafter,
    spec_of,
    tiny_model,
)
from tests.services.rollout.engines import (
    CHAINS,
    HYBRID,
    Scripted,
    check_all,
    check_greedy,
    finish,
    group,
    make_engine,
    prompts,
    reference,
    strategy,
)

VOCAB = 40
DEEP = strategy("hybrid", 2, nodes=8)
LONG = SamplingParams(temperature=0.0, max_tokens=32)


def knows(model, ids: tuple[int, ...], wrong: bool = False) -> Scripted:
    """An index that says with certainty how the greedy response goes on, or something else."""
    path = [*ids, *reference(model, ids, 40)[0]]

    def script(tokens: list[int], most: int) -> list[int]:
        if tokens != path[: len(tokens)]:  # behind draft tokens that are not the path
            return []
        right = path[len(tokens) : len(tokens) + most]
        return [(t + 1) % VOCAB for t in right] if wrong else right

    return Scripted(script)


def acceptance_length(found: dict[str, Rollout]) -> float:
    (rollout,) = found.values()
    assert rollout.acceptance.acceptance_length is not None
    return rollout.acceptance.acceptance_length


@pytest.mark.parametrize("kind", FAMILIES)
def test_where_the_index_is_sure_it_replaces_the_drafter(kind: str) -> None:
    model, ids = tiny_model(kind, VOCAB, 2, 2.0), (5, 9, 3)
    for drafter in (contrary_drafter, random_drafter):
        engine = make_engine(model, DEEP, drafter(spec_of(model)), index=knows(model, ids))
        found = finish(engine, [group(ids, 1, LONG)])
        check_all(model, found)
        assert acceptance_length(found) == 8, "seven tokens of the index and the target's own, every time"


@pytest.mark.parametrize("kind", FAMILIES)
def test_where_the_index_knows_nothing_the_drafter_drafts(kind: str) -> None:
    model, ids = markov_model(kind, VOCAB, 3, 2.0), (5, 9, 3)
    engine = make_engine(model, DEEP, perfect_drafter(spec_of(model)), index=Scripted(lambda tokens, most: []))
    found = finish(engine, [group(ids, 1, SamplingParams(temperature=0.0, max_tokens=33))])
    check_all(model, found)
    assert acceptance_length(found) == 3


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_index_continues_behind_the_drafters_tokens(kind: str) -> None:
    """An index that knows contexts only as they are two tokens into each draft."""
    model, ids = markov_model(kind, VOCAB, 3, 2.0), (5, 9, 3)
    path = [*ids, *reference(model, ids, 60)[0]]
    engine = make_engine(model, DEEP, perfect_drafter(spec_of(model)), index=Scripted(lambda tokens, most: []))
    known = engine._options.suffix_index
    assert isinstance(known, Scripted)

    def behind(tokens: list[int], most: int) -> list[int]:
        said = 3 + sum(r.num_tokens for r in engine.running())
        return path[len(tokens) : len(tokens) + most] if len(tokens) == said + 2 else []

    known._script = behind
    found = finish(engine, [group(ids, 1, SamplingParams(temperature=0.0, max_tokens=32))])
    check_all(model, found)
    assert acceptance_length(found) == 8


def test_a_drafter_that_does_badly_loses_the_requests_it_does_badly_for() -> None:
    """Rates are learned: after some rounds an unsure suffix is preferred to a drafter that is always wrong."""
    model, ids = tiny_model("qwen3", VOCAB, 2, 2.0), (5, 9, 3)
    index = SuffixIndex(10_000)
    work = group(ids, 1, SamplingParams(temperature=0.0, max_tokens=40))
    index.observe(work.prompt.id, [*ids, *reference(model, ids, 44)[0]], 0)
    engine = make_engine(model, DEEP, contrary_drafter(spec_of(model)), index=index)
    engine.submit([work])
    proposer, drawn = engine._proposer, []
    while engine.num_running or engine.num_waiting:
        engine.step()
        drawn.append(proposer._drawn[0])
    assert drawn[0] == 2 and drawn[-1] == 0


def mixed(engine: NativeEngine) -> set[tuple[bool, ...]]:
    """Runs to the end; by round, which rows were drawn by the EAGLE drafter."""
    seen = set()
    while engine.num_running or engine.num_waiting:
        for rollout in engine.step():
            check_greedy(tiny_model("llama", VOCAB, 2, 2.0), rollout.prompt_ids, rollout.response_ids)
        seen.add(tuple(n > 0 for n in engine._proposer._drawn))
    return seen


@pytest.mark.parametrize("s", [DEEP, *HYBRID], ids=lambda s: s.name)
def test_rows_of_one_batch_have_different_drafters(s) -> None:
    model = tiny_model("llama", VOCAB, 2, 2.0)
    index = Scripted(lambda tokens, most: [tokens[-1]] * (most if (tokens[0] + len(tokens)) % 3 else 0))
    engine = make_engine(model, s, random_drafter(spec_of(model)), index=index)
    engine.submit(
        [
            group(ids, 1, SamplingParams(temperature=0.0, max_tokens=12 + n))
            for n, ids in enumerate(prompts(VOCAB, 5, seed=3))
        ]
    )
    seen = mixed(engine)
    assert any(True in rows and False in rows for rows in seen)


def test_before_a_drafter_is_there_a_hybrid_drafts_with_the_index_alone() -> None:
    model, ids = tiny_model("llama", VOCAB, 2, 2.0), (5, 9, 3)
    found = finish(make_engine(model, DEEP, None, index=knows(model, ids)), [group(ids, 1, LONG)])
    check_all(model, found)
    assert acceptance_length(found) == 8


def test_a_prompt_of_one_token_waits_a_round_while_its_neighbours_draft() -> None:
    """It has no hidden state to draft from: its first round is an ordinary decode step."""
    model = markov_model("llama", VOCAB, 3, 2.0)
    engine = make_engine(model, CHAINS[2], perfect_drafter(spec_of(model)))
    works = [group((7,), 1, SamplingParams(temperature=0.0, max_tokens=9)), group((5, 9, 3), 1, LONG)]
    found = finish(engine, works)
    check_all(model, found)
    first, second = (found[f"{w.group_id}#0"].acceptance for w in works)
    assert first.steps_by_strategy == {"off": 1, CHAINS[2].name: 2} and first.acceptance_length == 4
    assert second.steps_by_strategy == {CHAINS[2].name: 8}


@pytest.mark.parametrize("s", [CHAINS[2], DEEP], ids=lambda s: s.name)
def test_prompts_of_one_token_alone(s) -> None:
    model = markov_model("llama", VOCAB, 3, 2.0)
    engine = make_engine(model, s, perfect_drafter(spec_of(model)))
    check_all(model, finish(engine, [group((7,), 2, LONG), group((8,), 1, LONG)]))


# -- a budget shared out


def uneven(s) -> tuple[dict[str, Rollout], list[tuple[int, ...]]]:
    """Two requests whose drafts are always right beside two whose drafts hardly ever are; by round what was drawn."""
    model = markov_model("llama", VOCAB, 3, 2.0)
    engine = make_engine(model, s, perfect_drafter(spec_of(model)))
    sure, hot = SamplingParams(temperature=0.0, max_tokens=40), SamplingParams(temperature=20.0, max_tokens=40)
    engine.submit(
        [group((5 + n, 9, 3), 1, sampling, first_seed=n) for n, sampling in enumerate((sure, hot, sure, hot))]
    )
    found: dict[str, Rollout] = {}
    drawn = []
    while engine.num_running or engine.num_waiting:
        running = engine.num_running or 4
        found |= {r.rollout_id: r for r in engine.step()}
        if running == 4:
            drawn.append(tuple(engine._proposer._drawn))
    return found, drawn


def steps(found: dict[str, Rollout], temperature: float) -> int:
    chosen = [r for r in found.values() if r.sampling.temperature == temperature]
    return sum(sum(r.acceptance.steps_by_strategy.values()) for r in chosen)


def test_tokens_go_to_the_requests_that_make_use_of_them() -> None:
    equal, _ = uneven(strategy("eagle", 3, sampled=False))
    shared, drawn = uneven(strategy("eagle", 6, sampled=False, budget=3))
    assert all(sum(row) <= 12 for row in drawn), "as many tokens to verify as three each"
    assert drawn[0] == (3, 3, 3, 3), "nothing is known yet"
    assert drawn[3][0] > 3 > drawn[3][1] and drawn[3][2] > 3 > drawn[3][3]
    assert steps(shared, 0.0) < 0.8 * steps(equal, 0.0)
    for r in shared.values():
        if r.sampling.temperature == 0:
            check_greedy(markov_model("llama", VOCAB, 3, 2.0), r.prompt_ids, r.response_ids)


class Watched(SuffixIndex):
    """Remembers how many tokens were counted."""

    counted = 0

    def _count(self, key: str, tokens, start: int) -> None:  # type: ignore[no-untyped-def]
        self.counted += len(tokens) - start
        super()._count(key, tokens, start)


def test_rounds_that_do_not_ask_the_index_do_not_pay_for_it() -> None:
    """A tenth of a small model's round on a CPU went into counting what nobody asked for."""
    model, ids, suffix = tiny_model("qwen3", VOCAB, 2, 2.0), (5, 9, 3), strategy("suffix", 4)
    index = Watched(100_000)
    engine = make_engine(model, index=index)
    finish(engine, [group(ids, 2, LONG)])
    assert index.counted == 0 and index.num_tokens == 3 + 2 * 32
    engine.force_strategy(suffix)
    found = finish(engine, [group(ids, 1, LONG)])
    check_all(model, found)
    assert acceptance_length(found) > 3, "and what was said then is known when it is asked for"
    assert index.counted >= 3 + 2 * 32


def test_what_the_index_has_to_catch_up_with_is_no_part_of_its_rounds_price() -> None:
    model, suffix = tiny_model("qwen3", VOCAB, 2, 2.0), strategy("suffix", 4)
    heard: list[RoundOutcome] = []

    class Listening(Fixed):
        def record(self, outcome: RoundOutcome) -> None:
            heard.append(outcome)

    engine = make_engine(model, Listening(suffix))
    engine.force_strategy(strategy_off := draft_strategy(StrategyConfig()))
    engine.submit([group((5, 9, 3), 1, LONG)])
    for s in (strategy_off, strategy_off, suffix, suffix, strategy_off, suffix):
        engine.force_strategy(s)
        engine.step()
    assert [o.seconds.extend > 0 for o in heard] == [False, False, True, False, False, True]
